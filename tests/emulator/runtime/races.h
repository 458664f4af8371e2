// Are two accesses to the same memory ordered? Happens-before by barriers, within one launch.
#pragma once
#include "fiber.h"
#include "memory.h"

namespace emulator {

void set_threadgroup_size(unsigned threads);
void become(const Fiber& fiber);  // the thread whose accesses follow
void check_history(Region& region, uintptr_t address, unsigned bytes, bool writes, bool atomic, void* place);

// Two threads may write one value to one place, which many kernels do. Whether a write is of the same value
// shows only once it has happened: at the thread's next access, wait or end.
void settle_pending_write();
void forget_pending_write();

}  // namespace emulator
