#include "stack_backward.h"
#include "stack_forward.h"

#if defined(_OPENMP)
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);
#else
static int omp_get_thread_num(void) {
  return 0;
}
static int omp_get_num_threads(void) {
  return 1;
}
#endif

namespace normalign {
namespace {

// f(team) on every thread, as one team.
template <class F>
void together(int threads, F f) {
  if (threads <= 1) {
    f(Team{0, 1});
    return;
  }
#pragma omp parallel num_threads(threads)
  f(Team{omp_get_thread_num(), omp_get_num_threads()});
}

template <class T>
int64_t workspace(const StackShape& s, int64_t batch, int probes, bool criterion, int threads) {
  return Layout<T>(s, batch, probes, criterion, threads).total * static_cast<int64_t>(sizeof(T));
}

template <class T>
void forward(const StackShape& s, const StackCall<T>& c) {
  const Forward<T> step(s, c);
  together(c.threads, [&step](Team team) {
    step.pack_all(team);
    for (int64_t b = 0; b < step.at.blocks; ++b) {
      if (!step.at.resident)
        step.forward_block(team, b);
      else if (b % team.size == team.rank)
        step.forward_block(Team{0, 1}, b);
    }
  });
  step.results();
}

template <class T>
void backward(const StackShape& s, const StackCall<T>& c) {
  const Backward<T> step(s, c);
  const bool penalty = step.penalty_counts();
  together(c.threads, [&step, penalty](Team team) {
    const Layout<T>& at = step.at;
    const bool own_lanes = at.resident && at.lanes >= team.size;
    const bool own_blocks = at.resident && !own_lanes;
    for (int64_t lane = 0; lane < at.lanes; ++lane) {
      if (own_lanes && lane % team.size != team.rank) continue;
      const Team mine = at.resident ? Team{0, 1} : team;
      for (int64_t b = at.lane_begin(lane); b < at.lane_begin(lane + 1); ++b) {
        if (own_blocks && b % team.size != team.rank) continue;
        step.backward_block(mine, b, penalty);
        if (!own_blocks) step.weight_gradients(mine, lane, b, penalty);
      }
    }
    team.barrier();
    if (own_blocks)
      for (int64_t lane = 0; lane < at.lanes; ++lane)
        for (int64_t b = at.lane_begin(lane); b < at.lane_begin(lane + 1); ++b)
          step.weight_gradients(team, lane, b, penalty);
    team.barrier();
    step.add_lanes(team);
  });
}

}  // namespace

extern const GrokalignStackTable NORMALIGN_VARIANT(grokalign_stack) = {
    workspace<float>, workspace<double>, forward<float>,
    forward<double>,  backward<float>,   backward<double>};

}  // namespace normalign
