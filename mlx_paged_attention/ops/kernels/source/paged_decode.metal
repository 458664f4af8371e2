// Attention of the queries of one work item and one kv head, in float32.
//
// The columns of the matrices are (query, head of the group) pairs, so that one load of a key serves
// all of them. A simdgroup works alone on 16 keys at a time:
//     scores [16 keys, columns] = keys [16, head_dim] x queries [head_dim, columns]
//     result [v_head_dim, columns] = values [v_head_dim, 16 keys] x weights [16 keys, columns]
// Which dimension stands in which row or column of a product is free as long as both factors agree:
// a lane takes whatever it can load 16 bytes at a time. Simdgroups are merged at the end.
//
// O: type of out. S: stored type. M: type of the matrices. TILES: columns / 8. SG: simdgroups.
// PICKED: queries per row, each anywhere among q's tokens, as `picked` says; 0 where they lie row by row.
// SCALE_BITS, CAP_BITS: float32 numbers, which cannot be arguments of a template.

constexpr int GROUP = H / KH;
constexpr int COLUMNS = 8 * TILES;

constexpr int WIDE = 16 / int(sizeof(S));
constexpr int KE = DK / 4;  // elements of a key that a lane holds, KW at a time
constexpr int KW = KE % WIDE == 0 ? WIDE : KE % (WIDE / 2) == 0 ? WIDE / 2 : WIDE / 4;
constexpr int KEY_WORDS = KE * int(sizeof(S)) / 4;
constexpr int KW_WORDS = KW * int(sizeof(S)) / 4;
constexpr int VE = DV / 8;  // elements of a value that a lane holds, VW at a time
constexpr int VW = VE % WIDE == 0 ? WIDE : VE % (WIDE / 2) == 0 ? WIDE / 2 : WIDE / 4;
constexpr int VALUE_WORDS = VE * int(sizeof(S)) / 4;
constexpr int VW_WORDS = VW * int(sizeof(S)) / 4;

const uint lane = thread_index_in_simdgroup;
const int sg = int(simdgroup_index_in_threadgroup);
const int r = matrix_row(lane), c = matrix_column(lane);
const int kv_head = int(threadgroup_position_in_grid.x) % KH;
const int first_column = int(threadgroup_position_in_grid.x) / KH * COLUMNS;
const int item = int(threadgroup_position_in_grid.y);
if (items[item * 4 + 3] != 0) return;  // only fills up the list
const int row = items[item * 4];
const int queries = PICKED > 0 ? PICKED : q_shape[2];
const int columns = min(COLUMNS, queries * GROUP - first_column);

// Block ids are read 32 at a time, one per lane, and handed round. The first ones are asked for before
// anything waits: few threadgroups may be at work, and what they load depends on what they loaded.
const int width = block_tables_shape[1];
int table_begin = items[item * 4 + 1] / BS;
int table = block_tables[row * width + min(table_begin + int(lane), width - 1)];

// What the queries of these columns may read: all of them full_begin .. full_end - 1, any of them
// begin .. end - 1.
int shortest = context_lens[row * queries + first_column / GROUP], longest = shortest;
ROLLED for (int i = first_column / GROUP + 1; i <= (first_column + columns - 1) / GROUP; i++) {
  const int context = context_lens[row * queries + i];
  shortest = min(shortest, context);
  longest = max(longest, context);
}
const int lowest = WINDOW > 0 ? max(0, shortest - WINDOW) : 0;
const int end = min(items[item * 4 + 2], longest);
const int begin = max(items[item * 4 + 1], lowest / BS * BS);
const int full_begin = WINDOW > 0 ? max(0, longest - WINDOW) : 0;
const int full_end = min(shortest, end);

// The lane's two columns of each tile: keys low .. high - 1.
int low[TILES * 2], high[TILES * 2];
UNROLL for (int i = 0; i < TILES * 2; i++) {
  const int column = first_column + i / 2 * 8 + c + i % 2;
  const int query = min(column / GROUP, queries - 1);
  const int context = context_lens[row * queries + query];
  high[i] = min(context, end);
  low[i] = WINDOW > 0 ? context - WINDOW : 0;
}

const float cap = float_of_bits(CAP_BITS);
const float scale = float_of_bits(SCALE_BITS) * (SOFTCAP ? 1.0f / cap : FLOAT_LOG2E);

float peak[TILES * 2], total[TILES * 2];
float result[TILES][DV / 16][4];
UNROLL for (int t = 0; t < TILES; t++) {
  peak[2 * t] = peak[2 * t + 1] = -INFINITY;
  total[2 * t] = total[2 * t + 1] = 0.0f;
  UNROLL for (int d = 0; d < DV / 16; d++) {
    UNROLL for (int i = 0; i < 4; i++) result[t][d][i] = 0.0f;
  }
}

constexpr int STEP = 16 * SG;

// ---- How keys and values come: through registers, unless the text before says otherwise (staged.cu).

#ifndef START_LOADING
#ifdef PREFETCH_LINE
// What is to be loaded a step later is put on its way into the cache.
constexpr int AHEAD = PREFETCH ? STEP : 0;
#define PREFETCH_PLANE(pool, dims, from)                                                        \
  UNROLL for (int l = 0; l < 16 * dims * int(sizeof(S)); l += 32 * 128) {                       \
    const int byte = l + int(lane) * 128;                                                       \
    const int at = from + byte / (dims * int(sizeof(S)));                                       \
    const int block = shuffle(table, min(at / BS - table_begin, 31));                           \
    if (byte < 16 * dims * int(sizeof(S))) {                                                    \
      PREFETCH_LINE(                                                                            \
          (const device char*)(pool + ((size_t(block) * KH + kv_head) * BS + at % BS) * dims) + \
          byte % (dims * int(sizeof(S))));                                                      \
    }                                                                                           \
  }
#define PREFETCH_STEP(from)          \
  if (PREFETCH && from < end) {      \
    PREFETCH_PLANE(k_pool, DK, from) \
    PREFETCH_PLANE(v_pool, DV, from) \
  }
#else
constexpr int AHEAD = 0;
#define PREFETCH_STEP(from)
#endif

#define LOAD_KEYS                                                                               \
  if ((position + 8 + AHEAD) / BS - table_begin >= 32) {                                        \
    table_begin = position / BS;                                                                \
    table = block_tables[row * width + min(table_begin + int(lane), width - 1)];                \
  }                                                                                             \
  UNROLL for (int i = 0; i < 2; i++) {                                                          \
    const int at = position + 8 * i;                                                            \
    blocks[i] = shuffle(table, at / BS - table_begin);                                          \
    const size_t from =                                                                         \
        (size_t(blocks[i]) * KH + kv_head) * (BS * DK) + (at % BS + r) * DK + c / 2 * KW;       \
    UNROLL for (int j = 0; j < KE / KW; j++) {                                                  \
      load_words<KW_WORDS>(key_words[i] + j * KW_WORDS, k_pool + from + j * 4 * KW);            \
    }                                                                                           \
  }

#define START_LOADING               \
  uint key_words[2][KEY_WORDS];     \
  int blocks[2];                    \
  int position = begin + 16 * sg;   \
  if (position < end) {             \
    LOAD_KEYS                       \
  }                                 \
  PREFETCH_STEP(position + AHEAD)

// The keys are there; the values are asked for while the scores are worked out.
#define TAKE_KEYS                                                                                 \
  uint value_words[4][VALUE_WORDS];                                                               \
  UNROLL for (int i = 0; i < 4; i++) {                                                            \
    const int at = position + i / 2 * 8;                                                          \
    const size_t from =                                                                           \
        (size_t(blocks[i / 2]) * KH + kv_head) * (BS * DV) + (at % BS + c + i % 2) * DV + r * VW; \
    UNROLL for (int j = 0; j < VE / VW; j++) {                                                    \
      load_words<VW_WORDS>(value_words[i] + j * VW_WORDS, v_pool + from + j * 8 * VW);            \
    }                                                                                             \
  }

// The next keys are on their way while these are worked on.
#define TAKE_VALUES          \
  const int here = position; \
  position += STEP;          \
  if (position < end) {      \
    LOAD_KEYS                \
  }                          \
  PREFETCH_STEP(position + AHEAD)
#endif

START_LOADING

// Addresses are simple where a query's elements lie side by side, as they nearly always do.
Pair<M> query_pairs[TILES][KE / 2];
#define LOAD_QUERIES(dim_stride)                                                                      \
  UNROLL for (int t = 0; t < TILES; t++) {                                                            \
    size_t from[2];                                                                                   \
    bool exists[2];                                                                                   \
    UNROLL for (int i = 0; i < 2; i++) {                                                              \
      const int column = first_column + t * 8 + right_column(lane, i);                                \
      const int query = column / GROUP, head = kv_head * GROUP + column % GROUP;                      \
      exists[i] = query < queries;                                                                    \
      const int index = min(query, queries - 1);                                                      \
      from[i] = size_t(head) * q_strides[1] +                                                         \
                size_t((right_row(lane, i) / 2 * KW + right_row(lane, i) % 2) * dim_stride);          \
      if (PICKED > 0) from[i] += size_t(int(picked[row * queries + index])) * q_strides[0];           \
      else from[i] += size_t(row) * q_strides[0] + size_t(index) * q_strides[2];                      \
    }                                                                                                 \
    UNROLL for (int p = 0; p < KE / 2; p++) {                                                         \
      float x[2];                                                                                     \
      UNROLL for (int i = 0; i < 2; i++) {                                                            \
        const size_t at = from[i] + size_t((2 * p / KW * 4 * KW + 2 * p % KW) * dim_stride);          \
        x[i] = exists[i] ? float(q[at]) : 0.0f;                                                       \
      }                                                                                               \
      query_pairs[t][p] = make_pair<M>(x[0], x[1]);                                                   \
    }                                                                                                 \
  }
if (q_strides[3] == 1) {
  LOAD_QUERIES(1)
} else {
  LOAD_QUERIES(q_strides[3])
}

while (position < end) {
  TAKE_KEYS

  float scores[TILES][4];
  UNROLL for (int t = 0; t < TILES; t++) {
    UNROLL for (int i = 0; i < 4; i++) scores[t][i] = 0.0f;
    UNROLL for (int p = 0; p < KE / 2; p += 2) {
      multiply_add<M>(
          scores[t], pair_at<S, M>(key_words[0], p), pair_at<S, M>(key_words[1], p),
          pair_at<S, M>(key_words[0], p + 1), pair_at<S, M>(key_words[1], p + 1), query_pairs[t][p],
          query_pairs[t][p + 1]);
    }
  }

  TAKE_VALUES

  const bool edge = here < full_begin || here + 16 > full_end;
  if (edge) {
    // A weight of 0 does not silence NaN in a slot that nobody may read.
    UNROLL for (int i = 0; i < 4; i++) {
      const int at = here + i / 2 * 8 + c + i % 2;
      if (at < lowest || at >= end) {
        UNROLL for (int w = 0; w < VALUE_WORDS; w++) value_words[i][w] = 0;
      }
    }
  }

  Pair<M> weights[TILES][2];
  UNROLL for (int t = 0; t < TILES; t++) {
    float shrink[2];
    UNROLL for (int i = 0; i < 4; i++) {
      float score = scores[t][i] * scale;
      if (SOFTCAP) score = cap * FLOAT_LOG2E * exact_tanh(score);
      if (edge) {
        const int at = here + i / 2 * 8 + r;
        const int column = 2 * t + i % 2;
        score = at >= low[column] && at < high[column] ? score : -INFINITY;
      }
      scores[t][i] = score;
    }
    UNROLL for (int i = 0; i < 2; i++) {
      const int column = 2 * t + i;
      const float highest = max(peak[column], max_over_rows(max(scores[t][i], scores[t][2 + i])));
      // Nothing seen yet: any finite stand-in gives weights of exp2(-inf) = 0.
      const float reference = highest == -INFINITY ? 0.0f : highest;
      shrink[i] = fast::exp2(peak[column] - reference);
      peak[column] = highest;
      scores[t][i] = fast::exp2(scores[t][i] - reference);
      scores[t][2 + i] = fast::exp2(scores[t][2 + i] - reference);
      total[column] = total[column] * shrink[i] + scores[t][i] + scores[t][2 + i];
    }
    weights[t][0] = as_right<M>(scores[t][0], scores[t][1], lane);
    weights[t][1] = as_right<M>(scores[t][2], scores[t][3], lane);
    UNROLL for (int d = 0; d < DV / 16; d++) {
      UNROLL for (int i = 0; i < 4; i++) result[t][d][i] *= shrink[i % 2];
    }
  }

  // Keys c, c + 1 and 8 + c, 9 + c stand in the left operand's columns, a lane's elements 2 d and
  // 2 d + 1 in its rows r and 8 + r.
  UNROLL for (int d = 0; d < DV / 16; d++) {
    Pair<M> v[4];
    UNROLL for (int i = 0; i < 4; i++) v[i] = pair_at<S, M>(value_words[i], d);
    UNROLL for (int t = 0; t < TILES; t++) {
      multiply_add<M>(
          result[t][d], first_of<M>(v[0], v[1]), second_of<M>(v[0], v[1]), first_of<M>(v[2], v[3]),
          second_of<M>(v[2], v[3]), weights[t][0], weights[t][1]);
    }
  }
}

// ---- Merge the simdgroups.

constexpr int CHUNK = 8 * VW;  // dimensions merged at a time
threadgroup float peaks[SG][COLUMNS];
threadgroup float totals[SG][COLUMNS];
threadgroup float parts[SG][COLUMNS][CHUNK + 1];

UNROLL for (int i = 0; i < TILES * 2; i++) {
  total[i] = sum_over_rows(total[i]);
  if (r == 0) {
    peaks[sg][i / 2 * 8 + c + i % 2] = peak[i];
    totals[sg][i / 2 * 8 + c + i % 2] = total[i];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const int out_row = SPLIT ? item : row;
float share[TILES * 2];
UNROLL for (int i = 0; i < TILES * 2; i++) {
  const int column = i / 2 * 8 + c + i % 2;
  const int query = (first_column + column) / GROUP;
  const int head = kv_head * GROUP + (first_column + column) % GROUP;
  float highest = -INFINITY;
  UNROLL for (int s = 0; s < SG; s++) highest = max(highest, peaks[s][column]);
  float sink = -INFINITY;
  if (SINKS && !SPLIT && column < columns) {
    sink = float(sinks[head]) * FLOAT_LOG2E;
    highest = max(highest, sink);
  }
  const float reference = highest == -INFINITY ? 0.0f : highest;
  float sum = fast::exp2(sink - reference);
  UNROLL for (int s = 0; s < SG; s++) sum += totals[s][column] * fast::exp2(peaks[s][column] - reference);
  share[i] = sum > 0.0f ? fast::exp2(peak[i] - reference) / sum : 0.0f;
  if (sg == 0 && r == 0 && column < columns) {
    lse[(size_t(out_row) * queries + query) * H + head] =
        sum > 0.0f ? highest * FLOAT_LN2 + log(sum) : -INFINITY;
  }
}

UNROLL for (int j = 0; j < VE / VW; j++) {
  UNROLL for (int t = 0; t < TILES; t++) {
    UNROLL for (int e = 0; e < VW; e++) {
      // Element e of the lane's part: row half e % 2 of product (j * VW + e) / 2.
      UNROLL for (int i = 0; i < 2; i++) {
        parts[sg][t * 8 + c + i][r * VW + e] = result[t][(j * VW + e) / 2][e % 2 * 2 + i] * share[2 * t + i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = int(thread_index_in_threadgroup); i < columns * CHUNK; i += 32 * SG) {
    const int column = i / CHUNK, dim = i % CHUNK;
    float sum = 0.0f;
    UNROLL for (int s = 0; s < SG; s++) sum += parts[s][column][dim];
    const int query = (first_column + column) / GROUP;
    const int head = kv_head * GROUP + (first_column + column) % GROUP;
    out[((size_t(out_row) * queries + query) * H + head) * DV + j * CHUNK + dim] = O(sum);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
