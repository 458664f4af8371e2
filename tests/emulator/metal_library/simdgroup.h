// <metal_simdgroup> and <metal_quadgroup>, all over one exchange of values between lanes.
// A quad operation waits for the whole simdgroup, which is stricter than the hardware.
#pragma once
#include "common.h"

namespace emu {
using namespace metal;

template <class T>
constexpr bool can_be_shuffled =
    sizeof(typename shape<T>::element) <= 4 && !__is_same(typename shape<T>::element, bool) &&
    (__is_integral(typename shape<T>::element) || __is_same(typename shape<T>::element, float) ||
     __is_same(typename shape<T>::element, half));

// The lanes' published values. Reading them is no access of the kernel.
template <class T> struct Lanes {
  const char* slots;
  unsigned active;

  EMU_INLINE explicit Lanes(const T& mine)
      : slots(emu_exchange(&mine, sizeof(T))), active(emu_active_lanes()) {}

  EMU_UNCHECKED EMU_INLINE T read(unsigned lane) const {
    T value;
    __builtin_memcpy(&value, slots + lane * SLOT_BYTES, sizeof(T));
    return value;
  }
  // A lane that takes no part has no value: NaN, or all bits set.
  EMU_UNCHECKED __attribute__((noinline)) T operator[](unsigned lane) const {
    if (lane < 32 && (active >> lane & 1)) return read(lane);
    T undefined;
    __builtin_memset(&undefined, 0xff, sizeof(T));
    return undefined;
  }
  // The first active lane combines, pairwise, in the order that the runtime gives; the others take its
  // result.
  template <class Combine> EMU_UNCHECKED __attribute__((noinline)) T reduce(Combine combine) const {
    const unsigned first = __builtin_ctz(active);
    char* result_slot = const_cast<char*>(slots) + first * SLOT_BYTES + SLOT_RESULT;
    T result;
    if (emu_lane() != first) {
      __builtin_memcpy(&result, result_slot, sizeof(T));
      return result;
    }
    const unsigned char* order = emu_reduction_order();
    T values[32];
    bool present[32];
    for (unsigned i = 0; i < 32; i++) {
      present[i] = active >> order[i] & 1;
      if (present[i]) values[i] = read(order[i]);
    }
    for (unsigned stride = 16; stride; stride >>= 1)
      for (unsigned i = 0; i < stride; i++)
        if (present[i + stride]) {
          values[i] = present[i] ? combine(values[i], values[i + stride]) : values[i + stride];
          present[i] = true;
        }
    __builtin_memcpy(result_slot, &values[0], sizeof(T));
    return values[0];
  }
  template <class Combine>
  EMU_UNCHECKED __attribute__((noinline)) T scan(T start, unsigned end, Combine combine) const {
    for (unsigned i = 0; i < end; i++)
      if (active >> i & 1) start = combine(start, read(i));
    return start;
  }
};

template <class T> struct Pair {
  T value, fill;
};

EMU_INLINE unsigned checked_lane(unsigned lane) {
  if (lane >= 32) emu_fail("simd lane index out of range");
  return lane;
}
EMU_INLINE unsigned first_of_quad() { return emu_lane() & ~3u; }

struct Sum {
  template <class T> T operator()(T a, T b) const { return T(a + b); }
};
struct Product {
  template <class T> T operator()(T a, T b) const { return T(a * b); }
};
struct Maximum {
  template <class T> T operator()(T a, T b) const { return max(a, b); }
};
struct Minimum {
  template <class T> T operator()(T a, T b) const { return min(a, b); }
};
struct And {
  template <class T> T operator()(T a, T b) const { return T(a & b); }
};
struct Or {
  template <class T> T operator()(T a, T b) const { return T(a | b); }
};
struct Xor {
  template <class T> T operator()(T a, T b) const { return T(a ^ b); }
};
}  // namespace emu

namespace metal {

#define EMU_SHUFFLED template <class T, class = enable_if_t<emu::can_be_shuffled<T>>> EMU_INLINE
// Without these a 64-bit argument would quietly convert.
#define EMU_REFUSE(name)                                                                            \
  template <class T, class... A, class = enable_if_t<__is_integral(T) && !emu::can_be_shuffled<T>>> \
  void name(T, A...) = delete;

#define EMU_REDUCE(name, combine)                                                     \
  EMU_SHUFFLED T simd_##name(T v) { return emu::Lanes<T>(v).reduce(emu::combine()); } \
  EMU_REFUSE(simd_##name)
EMU_REDUCE(sum, Sum)
EMU_REDUCE(product, Product)
EMU_REDUCE(max, Maximum)
EMU_REDUCE(min, Minimum)
EMU_REDUCE(and, And)
EMU_REDUCE(or, Or)
EMU_REDUCE(xor, Xor)
#undef EMU_REDUCE

#define EMU_SCAN(name, identity, combine)                                      \
  EMU_SHUFFLED T simd_prefix_inclusive_##name(T v) {                           \
    return emu::Lanes<T>(v).scan(T(identity), emu_lane() + 1, emu::combine()); \
  }                                                                            \
  EMU_SHUFFLED T simd_prefix_exclusive_##name(T v) {                           \
    return emu::Lanes<T>(v).scan(T(identity), emu_lane(), emu::combine());     \
  }
EMU_SCAN(sum, 0, Sum)
EMU_SCAN(product, 1, Product)
#undef EMU_SCAN

EMU_SHUFFLED T simd_shuffle(T v, ushort lane) { return emu::Lanes<T>(v)[emu::checked_lane(lane)]; }
EMU_SHUFFLED T simd_broadcast(T v, ushort lane) { return emu::Lanes<T>(v)[emu::checked_lane(lane)]; }
EMU_REFUSE(simd_shuffle)
EMU_REFUSE(simd_broadcast)
EMU_SHUFFLED T simd_broadcast_first(T v) {
  emu::Lanes<T> lanes(v);
  return lanes[__builtin_ctz(lanes.active)];
}
EMU_SHUFFLED T simd_shuffle_xor(T v, ushort mask) {
  return emu::Lanes<T>(v)[emu_lane() ^ emu::checked_lane(mask)];
}
EMU_SHUFFLED T simd_shuffle_down(T v, ushort delta) {
  emu::Lanes<T> lanes(v);
  const uint from = emu_lane() + delta;
  return from < 32 ? lanes[from] : v;
}
EMU_SHUFFLED T simd_shuffle_up(T v, ushort delta) {
  emu::Lanes<T> lanes(v);
  return emu_lane() >= delta ? lanes[emu_lane() - delta] : v;
}
EMU_SHUFFLED T simd_shuffle_rotate_down(T v, ushort delta) {
  return emu::Lanes<T>(v)[(emu_lane() + delta) % 32];
}
EMU_SHUFFLED T simd_shuffle_rotate_up(T v, ushort delta) {
  return emu::Lanes<T>(v)[(emu_lane() + 32 - delta % 32) % 32];
}
EMU_SHUFFLED T simd_shuffle_and_fill_up(T v, T fill, ushort delta) {
  emu::Lanes<emu::Pair<T>> lanes({v, fill});
  return emu_lane() >= delta ? lanes[emu_lane() - delta].value : lanes[emu_lane() + 32 - delta].fill;
}
EMU_SHUFFLED T simd_shuffle_and_fill_down(T v, T fill, ushort delta) {
  emu::Lanes<emu::Pair<T>> lanes({v, fill});
  const uint from = emu_lane() + delta;
  return from < 32 ? lanes[from].value : lanes[from - 32].fill;
}

EMU_INLINE bool simd_any(bool predicate) { return emu::Lanes<int>(predicate).reduce(emu::Or()); }
EMU_INLINE bool simd_all(bool predicate) { return emu::Lanes<int>(predicate).reduce(emu::And()); }
EMU_INLINE bool simd_is_first() { return emu_lane() == uint(__builtin_ctz(emu::Lanes<int>(0).active)); }

struct simd_vote {
  typedef ulong vote_t;
  vote_t lanes;
  explicit simd_vote(vote_t v = 0) : lanes(v) {}
  explicit operator vote_t() const { return lanes; }
  bool all() const { return lanes == 0xffffffffu; }
  bool any() const { return lanes; }
};
EMU_INLINE simd_vote simd_ballot(bool predicate) {
  return simd_vote(emu::Lanes<uint>(predicate ? 1u << emu_lane() : 0u).reduce(emu::Or()));
}
EMU_INLINE simd_vote simd_active_threads_mask() { return simd_ballot(true); }

#define EMU_QUAD_REDUCE(name, combine)                                                       \
  EMU_SHUFFLED T quad_##name(T v) {                                                          \
    emu::Lanes<T> lanes(v);                                                                  \
    const uint q = emu::first_of_quad();                                                     \
    emu::combine combine_;                                                                   \
    return combine_(combine_(lanes[q], lanes[q + 1]), combine_(lanes[q + 2], lanes[q + 3])); \
  }
EMU_QUAD_REDUCE(sum, Sum)
EMU_QUAD_REDUCE(product, Product)
EMU_QUAD_REDUCE(max, Maximum)
EMU_QUAD_REDUCE(min, Minimum)
#undef EMU_QUAD_REDUCE

EMU_SHUFFLED T quad_shuffle(T v, ushort lane) { return emu::Lanes<T>(v)[emu::first_of_quad() | (lane & 3u)]; }
EMU_SHUFFLED T quad_broadcast(T v, ushort lane) { return quad_shuffle(v, lane); }
EMU_SHUFFLED T quad_shuffle_xor(T v, ushort mask) {
  return emu::Lanes<T>(v)[emu::first_of_quad() | ((emu_lane() ^ mask) & 3u)];
}
EMU_SHUFFLED T quad_shuffle_down(T v, ushort delta) {
  emu::Lanes<T> lanes(v);
  return (emu_lane() & 3u) + delta < 4 ? lanes[emu_lane() + delta] : v;
}

#undef EMU_REFUSE

}  // namespace metal
