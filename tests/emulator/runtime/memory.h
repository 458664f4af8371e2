// What a kernel may touch, and who touched it last.
// Every buffer and threadgroup variable lies in a slot of address space so wide that an index which wrapped
// at 32 bits stays within the slot, so an address alone says which buffer was meant.
#pragma once
#include <cstddef>
#include <cstdint>

#include "launch.h"

namespace emulator {

constexpr int slot_shift = 35;                  // 32 GiB
constexpr uintptr_t slot_margin = 12ull << 30;  // before the data, and the size of the largest buffer
constexpr int slot_count = 192;

// Threads by identity (races.cpp), 0 for none; epochs packed.
struct LastAccess {
  uint32_t writer, write_epoch, reader, read_epoch;
};

struct Region {
  uintptr_t begin, end;
  const char* name;
  unsigned granule;  // bytes that share one history
  bool writable, shared_by_threadgroup, tracked, tracks_initialisation;
  LastAccess* history;    // of each granule
  uint64_t* initialised;  // one bit a granule
  unsigned long bytes() const { return end - begin; }
  size_t granules() const { return bytes() / granule + 1; }
};

bool reserve_address_space(const char** error);
Region* add_buffer(const BufferDescription& buffer);  // null when there is no room
void copy_back(const Region& region, const BufferDescription& buffer);
void release_regions();
void forget_threadgroup_memory();  // between threadgroups

// The kernel's own module, whose constants it may read.
void forget_module();
void add_module_segment(uintptr_t begin, uintptr_t end);

bool is_part_of_the_kernel(uintptr_t address, unsigned bytes);

extern void* last_place;  // of an access
void touch(uintptr_t address, unsigned bytes, bool writes, void* place, bool atomic = false);

}  // namespace emulator
