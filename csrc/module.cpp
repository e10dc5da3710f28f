#include "bind.h"
#include "dispatch.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace normalign {
void bind_grokalign_stack(py::module_& m);
void bind_orthogonal_projection(py::module_& m);
void bind_rfam_attack(py::module_& m);
void bind_rfam_fit(py::module_& m);
void bind_agop(py::module_& m);
void bind_elementary(py::module_& m);
void bind_laplace_gram(py::module_& m);
}  // namespace normalign

PYBIND11_MODULE(_C, m) {
  using namespace normalign;
  m.attr("version") = NORMALIGN_VERSION;
  m.attr("cuda_build") = NORMALIGN_CUDA_BUILD;  // its architectures, or why there are none
  m.def("isa", [] { return isa_name(isa()); });
  m.def("best_isa", [] { return isa_name(best_isa()); });
  m.def("select_isa", [](const std::string& name) { return select_isa(name.c_str()); });
  m.def("openmp", [] {
#if defined(_OPENMP)
    return _OPENMP;
#else
    return 0;
#endif
  });
  m.def("openmp_max_threads", [] {
#if defined(_OPENMP)
    return omp_get_max_threads();
#else
    return 1;
#endif
  });
  bind_grokalign_stack(m);
  bind_orthogonal_projection(m);
  bind_rfam_attack(m);
  bind_rfam_fit(m);
  bind_agop(m);
  bind_elementary(m);
  bind_laplace_gram(m);
}
