// The words that kernel bodies share with CUDA, for Metal.

#define FUNC METAL_FUNC
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL_BY_4 _Pragma("clang loop unroll_count(4)")
#define ROLLED _Pragma("clang loop unroll(disable)")
#define FLOAT_LOG2E 1.44269504088896340736f
#define FLOAT_LN2 0.69314718055994530942f

FUNC float float_of_bits(int bits) {
  return as_type<float>(bits);
}

// ---- Loads of 4, 8 or 16 bytes, kept as words until they are used.

template <int WORDS, typename S>
FUNC void load_words(thread uint* out, const device S* from) {
  if (WORDS == 4) {
    const uint4 w = *(const device uint4*)from;
    out[0] = w.x;
    out[1 % WORDS] = w.y;
    out[2 % WORDS] = w.z;
    out[3 % WORDS] = w.w;
  } else if (WORDS == 2) {
    const uint2 w = *(const device uint2*)from;
    out[0] = w.x;
    out[1 % WORDS] = w.y;
  } else {
    out[0] = *(const device uint*)from;
  }
}

FUNC void copy_16_bytes(device void* to, const device void* from) {
  *(device uint4*)to = *(const device uint4*)from;
}

// ---- Pairs: two neighbouring elements. Here they are floats whatever the matrices' type is.

template <typename M>
using Pair = float2;

template <typename M>
FUNC float2 make_pair(float x, float y) {
  return float2(x, y);
}

template <typename S>
struct Stored {
  static FUNC float2 pair(const thread uint* words, int i) {
    return float2(as_type<vec<S, 2>>(words[i]));
  }
};

template <>
struct Stored<float> {
  static FUNC float2 pair(const thread uint* words, int i) {
    return float2(as_type<float>(words[2 * i]), as_type<float>(words[2 * i + 1]));
  }
};

template <typename S, typename M>
FUNC float2 pair_at(const thread uint* words, int i) {
  return Stored<S>::pair(words, i);
}

template <typename M>
FUNC float2 first_of(float2 a, float2 b) {
  return float2(a.x, b.x);
}

template <typename M>
FUNC float2 second_of(float2 a, float2 b) {
  return float2(a.y, b.y);
}

// ---- 8 x 8 matrices over a simdgroup. A lane holds (row, column) and (row, column + 1).

FUNC int matrix_row(uint lane) {
  return int((lane & 16) >> 2 | (lane & 6) >> 1);
}

FUNC int matrix_column(uint lane) {
  return int((lane & 8) >> 1 | (lane & 1) << 1);
}

// Where element i of a lane's pair lies in a right operand.
FUNC int right_row(uint lane, int i) {
  return matrix_row(lane);
}

FUNC int right_column(uint lane, int i) {
  return matrix_column(lane) + i;
}

FUNC simdgroup_matrix<float, 8, 8> as_matrix(float2 pair) {
  simdgroup_matrix<float, 8, 8> m;
  reinterpret_cast<thread float2&>(m.thread_elements()) = pair;
  return m;
}

// acc [16, 8] += left [16, 16] * right [16, 8]; acc holds the lane's pairs of rows 0-7 and 8-15.
// left: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15; right: rows 0-7, then 8-15.
template <typename M>
FUNC void multiply_add(
    thread float* acc, float2 top0, float2 bottom0, float2 top1, float2 bottom1, float2 right0, float2 right1) {
  const simdgroup_matrix<float, 8, 8> r0 = as_matrix(right0), r1 = as_matrix(right1);
  simdgroup_matrix<float, 8, 8> top = as_matrix(float2(acc[0], acc[1]));
  simdgroup_matrix<float, 8, 8> bottom = as_matrix(float2(acc[2], acc[3]));
  simdgroup_multiply_accumulate(top, as_matrix(top0), r0, top);
  simdgroup_multiply_accumulate(bottom, as_matrix(bottom0), r0, bottom);
  simdgroup_multiply_accumulate(top, as_matrix(top1), r1, top);
  simdgroup_multiply_accumulate(bottom, as_matrix(bottom1), r1, bottom);
  const float2 t = reinterpret_cast<thread float2&>(top.thread_elements());
  const float2 b = reinterpret_cast<thread float2&>(bottom.thread_elements());
  acc[0] = t.x;
  acc[1] = t.y;
  acc[2] = b.x;
  acc[3] = b.y;
}

// A lane's pair of a result, as the same matrix in the place of a right operand.
template <typename M>
FUNC float2 as_right(float x, float y, uint lane) {
  return float2(x, y);
}

// A lane's pair of any matrix, as the same matrix in the place of a right operand.
template <typename M>
FUNC float2 pair_as_right(float2 pair, uint lane) {
  return pair;
}

FUNC float max_over_rows(float v) {
  v = max(v, simd_shuffle_xor(v, ushort(2)));
  v = max(v, simd_shuffle_xor(v, ushort(4)));
  return max(v, simd_shuffle_xor(v, ushort(16)));
}

FUNC float sum_over_rows(float v) {
  v += simd_shuffle_xor(v, ushort(2));
  v += simd_shuffle_xor(v, ushort(4));
  return v + simd_shuffle_xor(v, ushort(16));
}

FUNC int shuffle(int v, int lane) {
  return simd_shuffle(v, ushort(lane));
}

FUNC float shuffle(float v, int lane) {
  return simd_shuffle(v, ushort(lane));
}

FUNC float exact_tanh(float x) {
  return precise::tanh(x);
}
