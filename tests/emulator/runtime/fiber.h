// GPU threads as fibers: each has a stack of its own and runs until it must wait for others.
#pragma once
#include <cstdint>

#include "abi.h"

namespace emulator {

struct Context {
  void* stack_pointer;
};
extern "C" void emulator_switch(Context* from, Context* to);

enum class State { ready, waiting, finished };

// How many barriers, of the threadgroup and since then of the simdgroup, a thread has passed for one kind of
// memory.
struct Epoch {
  uint32_t threadgroup, simdgroup;
  uint32_t packed() const { return threadgroup << 12 | (simdgroup & 0xfff); }
};

struct Fiber {
  Context context;
  State state;
  Operation operation;  // what it waits in,
  void* place;          // where in the code,
  unsigned fences;      // and which memory that orders
  Epoch threadgroup_memory, device_memory;
  unsigned exchange_parity, active_lanes;
  GpuThread thread;
  char* stack;
};

constexpr long stack_bytes = 256 << 10;

void prepare(Fiber& fiber, void (*run)());

extern Fiber* current;  // null while the scheduler runs
extern Context scheduler;
void resume(Fiber& fiber);  // from the scheduler, until it waits or finishes
[[noreturn]] void finish();
void wait(Operation operation, void* place, unsigned fences);

}  // namespace emulator
