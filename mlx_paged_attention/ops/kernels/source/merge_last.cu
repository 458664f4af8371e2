// CUDA only, after the body of paged_decode: the last threadgroup to finish a piece of a row merges all of
// them, so that no second kernel need be launched. (Metal promises no order between threadgroups that
// would allow this.) Each row's counters are 0 before and after. R: type of merged.

const int first_piece = splits[row * (2 + gridDim.x)], pieces = splits[row * (2 + gridDim.x) + 1];
__threadfence();
threadgroup bool is_last;
__syncthreads();
if (threadIdx.x == 0) {
  uint* finished = (uint*)splits + row * (2 + gridDim.x) + 2 + blockIdx.x;
  is_last = atomicInc(finished, pieces - 1) == pieces - 1;
}
__syncthreads();
if (!is_last) return;
__threadfence();

const size_t stride = size_t(queries) * H;  // from a piece to the next
for (int column = sg; column < columns; column += SG) {
  const int query = (first_column + column) / GROUP;
  const int head = kv_head * GROUP + (first_column + column) % GROUP;
  const float* from = lse + (size_t(first_piece) * queries + query) * H + head;
  const float sink = SINKS ? float(sinks[head]) : -INFINITY;
  float mine = -INFINITY, sum = 0.0f;
  for (int i = lane; i < pieces; i += 32) {
    const float x = __ldcg(from + i * stride);
    if (x == -INFINITY) continue;
    const float before = mine;
    mine = max(mine, x);
    sum = sum * fast::exp2((before - mine) * FLOAT_LOG2E) + fast::exp2((x - mine) * FLOAT_LOG2E);
  }
  const float highest = max(simd_max(mine), sink);
  const float reference = highest == -INFINITY ? 0.0f : highest;
  sum = simd_sum(sum * fast::exp2((mine - reference) * FLOAT_LOG2E));
  sum += fast::exp2((sink - reference) * FLOAT_LOG2E);
  if (lane == 0) {
    peaks[0][column] = reference;
    totals[0][column] = sum > 0.0f ? 1.0f / sum : 0.0f;
    merged_lse[(size_t(row) * queries + query) * H + head] = sum > 0.0f ? highest + log(sum) : -INFINITY;
  }
}
__syncthreads();

for (int i = int(threadIdx.x); i < columns * (DV / 4); i += 32 * SG) {
  const int column = i / (DV / 4), dim = i % (DV / 4) * 4;
  const int query = (first_column + column) / GROUP;
  const int head = kv_head * GROUP + (first_column + column) % GROUP;
  const size_t from = (size_t(first_piece) * queries + query) * H + head;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  _Pragma("unroll 8") for (int p = 0; p < pieces; p++) {
    const float w = fast::exp2((__ldcg(lse + from + p * stride) - peaks[0][column]) * FLOAT_LOG2E);
    const float4 part = __ldcg((const float4*)(out + (from + p * stride) * DV + dim));
    sum.x += w * part.x;
    sum.y += w * part.y;
    sum.z += w * part.z;
    sum.w += w * part.w;
  }
  const float share = totals[0][column];
  const size_t to = ((size_t(row) * queries + query) * H + head) * DV + dim;
  merged[to] = R(sum.x * share);
  merged[to + 1] = R(sum.y * share);
  merged[to + 2] = R(sum.z * share);
  merged[to + 3] = R(sum.w * share);
}
