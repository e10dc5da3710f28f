// The kernels of csrc/cuda, compiled for the host.
#include "../cuda/agop.cu"
#include "../cuda/attack.cu"
#include "../cuda/cholesky.cu"
#include "../cuda/gram_tensor.cu"
#include "../cuda/laplace.cu"
#include "../cuda/orthogonal_projection.cu"
#include "../cuda/stack.cu"
