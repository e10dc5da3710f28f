// The built-in variables of a kernel, as the machine keeps them.
#pragma once
#include "machine.h"

namespace normalign {
namespace emu {

extern Index3 grid_dim, block_dim, block_index, thread_index;

}  // namespace emu
}  // namespace normalign
