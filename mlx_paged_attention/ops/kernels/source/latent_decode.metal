// Attention of one query per head over a latent that is both key and value (MLA), in float32. What is stored
// of a token is a latent and a rotated part, for all heads together:
//     score = scale * (q . latent) + q_rope . rope        result = sum of weight * latent
//
// A simdgroup owns a slice of the latent's dimensions, and 16 dimensions of every SG-th part of the rope, and
// loads those of KEYS tokens at a time, once, for all of the threadgroup's heads and for both products:
//     scores [16 keys, 8 heads] += latents [16 keys, slice] x queries [slice, 8 heads]
//     result [16 heads, slice] += weights [16 heads, 16 keys] x latents [16 keys, slice]
// The simdgroups' scores are added up in threadgroup memory, where each turns those of some heads into weights
// for all. As in paged_decode, a lane takes whatever dimensions it can load side by side.
//
// O: type of out. S: stored type. M: type of the matrices. DV, DR: dimensions of latent and rope. TILES: heads
// of a threadgroup / 16. SG: simdgroups. SCALE_BITS: a float32 number, which cannot be an argument of a template.

constexpr int COLUMNS = 16 * TILES;
constexpr int SLICE = DV / SG;

constexpr int WIDE = 16 / int(sizeof(S));
constexpr int LE = SLICE / 4;  // elements of a latent that a lane holds, LW at a time
constexpr int LW = LE % WIDE == 0 ? WIDE : WIDE / 2;
constexpr int LATENT_WORDS = LE * int(sizeof(S)) / 4;
constexpr int LW_WORDS = LW * int(sizeof(S)) / 4;
constexpr int PARTS = (DR + 16 * SG - 1) / (16 * SG);  // of the rope, 16 dimensions each
constexpr int PART_WORDS = int(sizeof(S));             // of 4 elements

const uint lane = thread_index_in_simdgroup;
const int sg = int(simdgroup_index_in_threadgroup);
const int r = matrix_row(lane), c = matrix_column(lane);
const int first_column = int(threadgroup_position_in_grid.x) * COLUMNS;
const int item = int(threadgroup_position_in_grid.y);
if (items[item * 4 + 3] != 0) return;  // only fills up the list
const int row = items[item * 4];
const int columns = min(COLUMNS, H - first_column);
const int width = block_tables_shape[1];
// As merge_last.cu, which may follow, has them of paged_decode.
constexpr int GROUP = H, kv_head = 0, queries = 1;
const int begin = items[item * 4 + 1];
const int end = min(items[item * 4 + 2], context_lens[row]);

// Block ids are read 32 at a time, one per lane, and handed round.
int table_begin = begin / BS;
int table = block_tables[row * width + min(table_begin + int(lane), width - 1)];

// The lane's part of keys r, 8 + r, ...: now, and a step later.
uint words[KEYS / 8][LATENT_WORDS], rope_words[KEYS / 8][PARTS * PART_WORDS];
uint next_words[KEYS / 8][LATENT_WORDS], next_rope_words[KEYS / 8][PARTS * PART_WORDS];
#define LOAD_LATENTS(first)                                                                       \
  if (((first) + KEYS - 8) / BS - table_begin >= 32) {                                            \
    table_begin = (first) / BS;                                                                   \
    table = block_tables[row * width + min(table_begin + int(lane), width - 1)];                  \
  }                                                                                               \
  UNROLL for (int i = 0; i < KEYS / 8; i++) {                                                     \
    const int at = (first) + 8 * i;                                                               \
    const size_t line = size_t(shuffle(table, at / BS - table_begin)) * BS + (at % BS + r);       \
    UNROLL for (int j = 0; j < LE / LW; j++) {                                                    \
      load_words<LW_WORDS>(                                                                       \
          next_words[i] + j * LW_WORDS, latents + line * DV + sg * SLICE + (c / 2 + 4 * j) * LW); \
    }                                                                                             \
    UNROLL for (int j = 0; j < PARTS; j++) {                                                      \
      const int dim = (j * SG + sg) * 16 + c / 2 * 4;                                             \
      if (dim < DR) {                                                                             \
        load_words<PART_WORDS>(next_rope_words[i] + j * PART_WORDS, ropes + line * DR + dim);     \
      } else {                                                                                    \
        UNROLL for (int w = 0; w < PART_WORDS; w++) next_rope_words[i][j * PART_WORDS + w] = 0;   \
      }                                                                                           \
    }                                                                                             \
  }

if (begin < end) {
  LOAD_LATENTS(begin)
}

Pair<M> query_pairs[2 * TILES][LE / 2], rope_pairs[2 * TILES][PARTS * 2];
UNROLL for (int t = 0; t < 2 * TILES; t++) {
  float x[2];
  UNROLL for (int p = 0; p < LE / 2; p++) {
    UNROLL for (int i = 0; i < 2; i++) {
      const int column = t * 8 + right_column(lane, i), from = right_row(lane, i);
      const int dim = sg * SLICE + (from / 2 + 2 * p / LW * 4) * LW + from % 2 + 2 * p % LW;
      const int head = first_column + min(column, columns - 1);
      const float value =
          float(q[size_t(row) * q_strides[0] + size_t(head) * q_strides[1] + size_t(dim) * q_strides[3]]);
      x[i] = column < columns ? value : 0.0f;
    }
    query_pairs[t][p] = make_pair<M>(x[0], x[1]);
  }
  UNROLL for (int p = 0; p < PARTS * 2; p++) {
    UNROLL for (int i = 0; i < 2; i++) {
      const int column = t * 8 + right_column(lane, i), from = right_row(lane, i);
      const int dim = (p / 2 * SG + sg) * 16 + from / 2 * 4 + from % 2 + p % 2 * 2;
      const int head = first_column + min(column, columns - 1);
      x[i] = column < columns && dim < DR ? float(q_rope[size_t(row) * q_rope_strides[0] +
                                                         size_t(head) * q_rope_strides[1] +
                                                         size_t(dim) * q_rope_strides[3]])
                                          : 0.0f;
    }
    rope_pairs[t][p] = make_pair<M>(x[0], x[1]);
  }
}

const float scale = float_of_bits(SCALE_BITS);

// A simdgroup makes the weights of HEADS_AT_ONCE heads at a time, a lane those of one head and key.
constexpr int HEADS_AT_ONCE = 32 / KEYS;
constexpr int MINE = COLUMNS / (SG * HEADS_AT_ONCE);
const int key = int(lane) % KEYS;
float peak[MINE], total[MINE];
UNROLL for (int h = 0; h < MINE; h++) {
  peak[h] = -INFINITY;
  total[h] = 0.0f;
}

// Rows are so long that a simdgroup's accesses fall on different banks.
threadgroup float partial[SG][COLUMNS][KEYS + 4];
threadgroup float weights[COLUMNS][KEYS + 8];
threadgroup float shrink[COLUMNS];

float result[TILES][LE / 2][4];
UNROLL for (int t = 0; t < TILES; t++) {
  UNROLL for (int p = 0; p < LE / 2; p++) {
    UNROLL for (int i = 0; i < 4; i++) result[t][p][i] = 0.0f;
  }
}

for (int position = begin; position < end; position += KEYS) {
  UNROLL for (int i = 0; i < KEYS / 8; i++) {
    UNROLL for (int w = 0; w < LATENT_WORDS; w++) words[i][w] = next_words[i][w];
    UNROLL for (int w = 0; w < PARTS * PART_WORDS; w++) rope_words[i][w] = next_rope_words[i][w];
  }
  if (position + KEYS < end) {
    LOAD_LATENTS(position + KEYS)
  } else {
    // A weight of 0 does not silence NaN in a slot that nobody may read.
    UNROLL for (int i = 0; i < KEYS / 8; i++) {
      if (position + 8 * i + r >= end) {
        UNROLL for (int w = 0; w < LATENT_WORDS; w++) words[i][w] = 0;
        UNROLL for (int w = 0; w < PARTS * PART_WORDS; w++) rope_words[i][w] = 0;
      }
    }
  }

  UNROLL for (int m = 0; m < KEYS / 16; m++) {
    float scores[2 * TILES][4];
    UNROLL for (int t = 0; t < 2 * TILES; t++) {
      UNROLL for (int i = 0; i < 4; i++) scores[t][i] = 0.0f;
    }
    UNROLL for (int p = 0; p < LE / 2; p += 2) {
      const Pair<M> top0 = pair_at<S, M>(words[2 * m], p), bottom0 = pair_at<S, M>(words[2 * m + 1], p);
      const Pair<M> top1 = pair_at<S, M>(words[2 * m], p + 1), bottom1 = pair_at<S, M>(words[2 * m + 1], p + 1);
      UNROLL for (int t = 0; t < 2 * TILES; t++) {
        multiply_add<M>(scores[t], top0, bottom0, top1, bottom1, query_pairs[t][p], query_pairs[t][p + 1]);
      }
    }
    UNROLL for (int t = 0; t < 2 * TILES; t++) {
      UNROLL for (int i = 0; i < 4; i++) scores[t][i] *= scale;
    }
    UNROLL for (int p = 0; p < PARTS * 2; p += 2) {
      const Pair<M> top0 = pair_at<S, M>(rope_words[2 * m], p);
      const Pair<M> bottom0 = pair_at<S, M>(rope_words[2 * m + 1], p);
      const Pair<M> top1 = pair_at<S, M>(rope_words[2 * m], p + 1);
      const Pair<M> bottom1 = pair_at<S, M>(rope_words[2 * m + 1], p + 1);
      UNROLL for (int t = 0; t < 2 * TILES; t++) {
        multiply_add<M>(scores[t], top0, bottom0, top1, bottom1, rope_pairs[t][p], rope_pairs[t][p + 1]);
      }
    }
    UNROLL for (int t = 0; t < 2 * TILES; t++) {
      UNROLL for (int i = 0; i < 4; i++) {
        partial[sg][t * 8 + c + i % 2][m * 16 + i / 2 * 8 + r] = scores[t][i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  UNROLL for (int h = 0; h < MINE; h++) {
    const int column = (h * SG + sg) * HEADS_AT_ONCE + int(lane) / KEYS;
    float score = 0.0f;
    UNROLL for (int s = 0; s < SG; s++) score += partial[s][column][key];
    score = position + key < end ? score * FLOAT_LOG2E : -INFINITY;
    float highest = score;
    UNROLL for (int mask = KEYS / 2; mask; mask >>= 1) highest = max(highest, simd_shuffle_xor(highest, mask));
    // Every step has a key, so there is a finite score unless the model's own numbers are not.
    highest = max(peak[h], highest);
    const float reference = highest == -INFINITY ? 0.0f : highest;
    const float less = fast::exp2(peak[h] - reference);
    peak[h] = highest;
    score = fast::exp2(score - reference);
    total[h] = total[h] * less + score;  // of this lane's keys
    weights[column][key] = score;
    if (key == 0) shrink[column] = less;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  UNROLL for (int t = 0; t < TILES; t++) {
    const float top = shrink[t * 16 + r], bottom = shrink[t * 16 + 8 + r];
    UNROLL for (int p = 0; p < LE / 2; p++) {
      UNROLL for (int i = 0; i < 4; i++) result[t][p][i] *= i < 2 ? top : bottom;
    }
  }
  UNROLL for (int m = 0; m < KEYS / 16; m++) {
    Pair<M> w[TILES][4];
    UNROLL for (int t = 0; t < TILES; t++) {
      UNROLL for (int i = 0; i < 4; i++) {
        const int head = t * 16 + i % 2 * 8 + r, at = m * 16 + i / 2 * 8 + c;
        w[t][i] = make_pair<M>(weights[head][at], weights[head][at + 1]);
      }
    }
    UNROLL for (int p = 0; p < LE / 2; p++) {
      const Pair<M> first = pair_as_right<M>(pair_at<S, M>(words[2 * m], p), lane);
      const Pair<M> second = pair_as_right<M>(pair_at<S, M>(words[2 * m + 1], p), lane);
      UNROLL for (int t = 0; t < TILES; t++) {
        multiply_add<M>(result[t][p], w[t][0], w[t][1], w[t][2], w[t][3], first, second);
      }
    }
  }
}

// ---- Every simdgroup writes its dimensions.

const int out_row = SPLIT ? item : row;
threadgroup float share[COLUMNS];
UNROLL for (int h = 0; h < MINE; h++) {
  const int column = (h * SG + sg) * HEADS_AT_ONCE + int(lane) / KEYS;
  float sum = total[h];
  UNROLL for (int mask = KEYS / 2; mask; mask >>= 1) sum += simd_shuffle_xor(sum, mask);
  if (key == 0) {
    share[column] = sum > 0.0f ? 1.0f / sum : 0.0f;
    if (column < columns) {
      lse[size_t(out_row) * H + first_column + column] = sum > 0.0f ? peak[h] * FLOAT_LN2 + log(sum) : -INFINITY;
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
UNROLL for (int t = 0; t < TILES; t++) {
  UNROLL for (int i = 0; i < 2; i++) {
    const int column = t * 16 + i * 8 + r;
    if (column < columns) {
      const size_t to = (size_t(out_row) * H + first_column + column) * DV + sg * SLICE;
      UNROLL for (int e = 0; e < LE; e++) {
        const int dim = (c / 2 + e / LW * 4) * LW + e % LW;
        out[to + dim] = O(result[t][e / 2][2 * i + e % 2] * share[column]);
      }
    }
  }
}
