// <metal_simdgroup_matrix>: 8x8 matrices, two elements a lane, in the layout that MLX's kernels rely on.
#pragma once
#include "simdgroup.h"

namespace emu {
EMU_INLINE unsigned matrix_row() { return (emu_lane() / 4 & 4) + emu_lane() / 2 % 4; }
EMU_INLINE unsigned matrix_column() { return (emu_lane() / 4 & 2) * 2 + emu_lane() % 2 * 2; }
EMU_INLINE unsigned lane_of(unsigned row, unsigned column) {
  return (row & 4) * 4 + (column & 4) * 2 + (row & 3) * 2 + (column & 2) / 2;
}
EMU_INLINE void converge() { Lanes<int>(0); }

template <class A, class B> struct Operands {
  vec<A, 2> a;
  vec<B, 2> b;
};
// One element of a · b + c, from the operands that the lanes published.
template <class A, class B>
EMU_UNCHECKED __attribute__((noinline)) float product_element(const Lanes<Operands<A, B>>& lanes,
                                                              unsigned row, unsigned column, float sum) {
  for (unsigned k = 0; k < 8; k++) {
    const A a = lanes.read(lane_of(row, k)).a.data[k & 1];
    const B b = lanes.read(lane_of(k, column)).b.data[column & 1];
    sum += float(a) * float(b);
  }
  return sum;
}
}  // namespace emu

namespace metal {

template <class T, int Rows = 8, int Columns = 8> struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "simdgroup_matrix is 8x8");
  static_assert(is_floating_point_v<T>, "simdgroup_matrix: half, bfloat or float");
  typedef vec<T, 2> storage_type;
  storage_type elements;

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    const uint r = emu::matrix_row(), c = emu::matrix_column();
    elements.data[0] = r == c ? diagonal : T(0);
    elements.data[1] = r == c + 1 ? diagonal : T(0);
  }
  EMU_INLINE storage_type& thread_elements() { return elements; }
  EMU_INLINE const storage_type& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float> simdgroup_float8x8;
typedef simdgroup_matrix<half> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat> simdgroup_bfloat8x8;

template <class T, int R, int C> EMU_INLINE simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, R, C> m;
  m.elements = vec<T, 2>(value, value);
  return m;
}

template <class T, int R, int C>
EMU_INLINE void simdgroup_load(simdgroup_matrix<T, R, C>& m, const T* p, ulong row_stride = 8,
                               ulong2 origin = ulong2(0ul, 0ul), bool transpose = false) {
  emu::converge();
  const ulong r = emu::matrix_row(), c = emu::matrix_column();
  for (int i = 0; i < 2; i++)
    m.elements.data[i] = transpose ? p[(origin.y + c + i) * row_stride + origin.x + r]
                                   : p[(origin.y + r) * row_stride + origin.x + c + i];
}
template <class T, int R, int C>
EMU_INLINE void simdgroup_store(simdgroup_matrix<T, R, C> m, T* p, ulong row_stride = 8,
                                ulong2 origin = ulong2(0ul, 0ul), bool transpose = false) {
  emu::converge();
  const ulong r = emu::matrix_row(), c = emu::matrix_column();
  for (int i = 0; i < 2; i++)
    (transpose ? p[(origin.y + c + i) * row_stride + origin.x + r]
               : p[(origin.y + r) * row_stride + origin.x + c + i]) = m.elements.data[i];
}

template <class D, class A, class B, class Addend, int R, int C>
EMU_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, R, C>& d, simdgroup_matrix<A, R, C> a,
                                              simdgroup_matrix<B, R, C> b, simdgroup_matrix<Addend, R, C> c) {
  emu::Lanes<emu::Operands<A, B>> lanes({a.elements, b.elements});
  if (lanes.active != 0xffffffffu) emu_fail("simdgroup_multiply_accumulate needs all 32 lanes");
  const unsigned row = emu::matrix_row(), column = emu::matrix_column();
  for (unsigned i = 0; i < 2; i++)
    d.elements.data[i] = D(emu::product_element(lanes, row, column + i, float(c.elements.data[i])));
}
template <class D, class A, class B, int R, int C>
EMU_INLINE void simdgroup_multiply(simdgroup_matrix<D, R, C>& d, simdgroup_matrix<A, R, C> a,
                                   simdgroup_matrix<B, R, C> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, R, C>(D(0)));
}

}  // namespace metal
