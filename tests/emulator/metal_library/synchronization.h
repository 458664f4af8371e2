// Barriers and <metal_atomic>. Ordering between atomics is not modelled: threads of a launch run one at a
// time.
#pragma once
#include "common.h"

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = FENCE_DEVICE,
  mem_threadgroup = FENCE_THREADGROUP,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8
};
EMU_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

EMU_INLINE void threadgroup_barrier(mem_flags flags) { emu_barrier(THREADGROUP_BARRIER, uint(flags)); }
EMU_INLINE void simdgroup_barrier(mem_flags flags) { emu_barrier(SIMDGROUP_BARRIER, uint(flags)); }

enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst
};
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device,
  thread_scope_system
};
EMU_INLINE void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}

template <class T> struct atomic {
  static_assert(__is_same(T, int) || __is_same(T, uint) || __is_same(T, float) || __is_same(T, bool) ||
                    __is_same(T, ulong),
                "atomic<T>: T is int, uint, float, bool or ulong");
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;

}  // namespace metal

namespace emu {
using metal::atomic;
template <class T> struct same {
  typedef T type;
};  // keeps an argument out of type deduction

template <class T> EMU_UNCHECKED __attribute__((noinline)) T load(const volatile atomic<T>* p) {
  emu_atomic_access((const void*)p, sizeof(T), 0);
  return const_cast<const atomic<T>*>(p)->value;
}
template <class T> EMU_UNCHECKED __attribute__((noinline)) void store(volatile atomic<T>* p, T value) {
  emu_atomic_access((const void*)p, sizeof(T), 1);
  const_cast<atomic<T>*>(p)->value = value;
}
}  // namespace emu

namespace metal {

template <class T> EMU_INLINE T atomic_load_explicit(const volatile atomic<T>* p, memory_order) {
  return emu::load(p);
}
template <class T>
EMU_INLINE void atomic_store_explicit(volatile atomic<T>* p, typename emu::same<T>::type v, memory_order) {
  emu::store(p, v);
}
template <class T>
EMU_INLINE T atomic_exchange_explicit(volatile atomic<T>* p, typename emu::same<T>::type v, memory_order) {
  T old = emu::load(p);
  emu::store(p, v);
  return old;
}
#define EMU_FETCH(name, CONDITION, expression)                                                      \
  template <class T, class = enable_if_t<CONDITION>>                                                \
  EMU_INLINE T atomic_fetch_##name##_explicit(volatile atomic<T>* p, typename emu::same<T>::type v, \
                                              memory_order) {                                       \
    T old = emu::load(p);                                                                           \
    emu::store(p, T(expression));                                                                   \
    return old;                                                                                     \
  }
EMU_FETCH(add, true, old + v)
EMU_FETCH(sub, true, old - v)
EMU_FETCH(and, __is_integral(T), old& v)
EMU_FETCH(or, __is_integral(T), old | v)
EMU_FETCH(xor, __is_integral(T), old ^ v)
EMU_FETCH(max, __is_integral(T), old < v ? v : old)
EMU_FETCH(min, __is_integral(T), v < old ? v : old)
#undef EMU_FETCH

template <class T>
EMU_INLINE bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* p, T* expected,
                                                      typename emu::same<T>::type desired, memory_order,
                                                      memory_order) {
  T old = emu::load(p);
  if (__builtin_memcmp(&old, expected, sizeof(T)) == 0) {
    emu::store(p, desired);
    return true;
  }
  *expected = old;
  return false;
}

}  // namespace metal
