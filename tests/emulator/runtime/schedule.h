// Simdgroups and threadgroups: who waits, who may go on, and who waits in vain.
#pragma once
#include "fiber.h"

namespace emulator {

void set_up_fibers(unsigned count);  // threads of the largest threadgroup
Fiber& fiber(unsigned index);
// False when a fault was reported.
bool run_threadgroup(unsigned threads, unsigned shuffle);

}  // namespace emulator
