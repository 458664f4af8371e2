// What a compiled kernel and the runtime know of each other. The kernel sees no C library, so neither does
// this.
#pragma once

struct GpuThread {
  unsigned position_in_grid[3];
  unsigned position_in_threadgroup[3];
  unsigned threadgroup_position[3];
  unsigned threads_per_threadgroup[3];  // smaller than dispatched at the grid's edge
  unsigned dispatched_threads_per_threadgroup[3];
  unsigned threads_per_grid[3];
  unsigned threadgroups_per_grid[3];
  unsigned index_in_threadgroup;
  unsigned lane, simdgroup;
  unsigned simdgroups, dispatched_simdgroups;
};

// Every lane publishes up to half a slot in an exchange; a reduction puts its result in the other half.
enum { SLOT_BYTES = 128, SLOT_RESULT = 64 };

enum Operation { SIMD_OPERATION = 1, SIMDGROUP_BARRIER = 2, THREADGROUP_BARRIER = 3 };
enum { FENCE_DEVICE = 1, FENCE_THREADGROUP = 2 };

extern "C" {
// Publishes a lane's value, waits for the lanes that take part, returns the slots of the simdgroup's 32
// lanes.
__attribute__((convergent, nomerge, noinline)) const char* emu_exchange(const void* value, unsigned bytes);
__attribute__((convergent, nomerge, noinline)) void emu_barrier(int operation, unsigned fences);
unsigned emu_active_lanes();
unsigned emu_lane();
const unsigned char* emu_reduction_order();
float emu_inexact(float exact);
void emu_fail(const char* message);
void emu_atomic_access(const void* address, unsigned bytes, int is_write);
void* emu_threadgroup_variable(int id, unsigned long bytes, unsigned long alignment, const char* name);
void emu_threadgroup_zero(int id);
void* emu_threadgroup_argument(int index);
}
