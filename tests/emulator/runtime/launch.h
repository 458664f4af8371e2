// One launch: its options, and what it counts.
#pragma once
#include <cstdint>

namespace emulator {

enum SimdRule {
  EVERY_LANE,       // every lane of the simdgroup takes part in every simd operation
  CONVERGED_LANES,  // lanes that have returned may be missing
  ANY_LANES         // lanes of a divergent branch run apart, as the hardware does
};

struct Options {
  int simd_rule;
  int shuffle_order;  // seed for the order of simdgroups and of reductions; 0: ascending
  int flush_subnormals;
  int fast_math_ulps;
  long threadgroup_memory_limit;
  long seconds;  // after which a launch is taken for an endless loop
  long threadgroup_argument_bytes[4];
};

struct Statistics {
  long threads, simd_operations, partial_simd_operations, barriers, memory_accesses, threadgroup_bytes;
  long writes_of_the_same_value;
};

struct BufferDescription {
  void* data;
  int file;  // of pages to map instead of copying `data`, or -1
  unsigned long bytes;
  unsigned element_bytes;
  int writable, initialised;
  const char* name;
};

extern Options options;
extern Statistics statistics;

}  // namespace emulator
