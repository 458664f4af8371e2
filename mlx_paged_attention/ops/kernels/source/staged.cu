// CUDA only (compute capability 9.0 and later), before the body of paged_decode: keys and values come by way
// of shared memory. The copy engine fetches whole blocks while a warp works on earlier ones: STAGES steps are
// under way at any time, where registers have room for one.

#define START_LOADING                                                            \
  constexpr int COPIED = BS % 16 == 0 ? 16 : 8; /* keys that lie side by side */ \
  constexpr int KEY_BYTES = COPIED * DK * int(sizeof(S));                        \
  constexpr int VALUE_BYTES = COPIED * DV * int(sizeof(S));                      \
  constexpr int COPIES = 16 / COPIED;                                            \
  constexpr int STEP_BYTES = COPIES * (KEY_BYTES + VALUE_BYTES);                 \
  extern __shared__ __align__(128) unsigned char staged[];                       \
  __shared__ unsigned long long arrived[SG][STAGES];                             \
  unsigned char* const stages = staged + sg * (STAGES * STEP_BYTES);             \
  int position = begin + 16 * sg;                                                \
  if (lane == 0) {                                                               \
    UNROLL for (int s = 0; s < STAGES; s++) barrier_init(&arrived[sg][s]);       \
    barriers_are_made();                                                         \
  }                                                                              \
  __syncwarp();                                                                  \
  ROLLED for (int s = 0; s < STAGES; s++) {                                      \
    if (position + s * STEP < end) FETCH(position + s * STEP, s)                 \
  }                                                                              \
  int stage = 0;                                                                 \
  uint turn = 0;

// A lane per copy asks for it: first the keys', then the values'.
#define FETCH(first, to)                                                                                        \
  {                                                                                                             \
    if (((first) + 8) / BS - table_begin >= 32) {                                                               \
      table_begin = (first) / BS;                                                                               \
      table = block_tables[row * width + min(table_begin + int(lane), width - 1)];                              \
    }                                                                                                           \
    const int part = int(lane) % COPIES, at = (first) + part * COPIED;                                          \
    const int block = shuffle(table, at / BS - table_begin);                                                    \
    const size_t line = (size_t(block) * KH + kv_head) * BS + at % BS;                                          \
    unsigned char* const step = stages + (to) * STEP_BYTES;                                                     \
    if (lane == 0) barrier_expect(&arrived[sg][to], STEP_BYTES);                                                \
    if (lane < COPIES) {                                                                                        \
      fetch(step + part * KEY_BYTES, k_pool + line * DK, KEY_BYTES, &arrived[sg][to]);                          \
      fetch(step + COPIES * KEY_BYTES + part * VALUE_BYTES, v_pool + line * DV, VALUE_BYTES, &arrived[sg][to]); \
    }                                                                                                           \
  }

#define TAKE_KEYS                                                                                           \
  barrier_wait(&arrived[sg][stage], turn);                                                                  \
  const S* const keys = (const S*)(stages + stage * STEP_BYTES);                                            \
  const S* const values = keys + 16 * DK;                                                                   \
  uint key_words[2][KEY_WORDS];                                                                             \
  UNROLL for (int i = 0; i < 2; i++) {                                                                      \
    UNROLL for (int j = 0; j < KE / KW; j++) {                                                              \
      take_words<KW_WORDS>(key_words[i] + j * KW_WORDS, keys + (8 * i + r) * DK + c / 2 * KW + j * 4 * KW); \
    }                                                                                                       \
  }

// Once all lanes have what they need, the next step but STAGES takes this one's place.
#define TAKE_VALUES                                                                                    \
  uint value_words[4][VALUE_WORDS];                                                                    \
  UNROLL for (int i = 0; i < 4; i++) {                                                                 \
    UNROLL for (int j = 0; j < VE / VW; j++) {                                                         \
      take_words<VW_WORDS>(                                                                            \
          value_words[i] + j * VW_WORDS, values + (i / 2 * 8 + c + i % 2) * DV + r * VW + j * 8 * VW); \
    }                                                                                                  \
  }                                                                                                    \
  const int here = position;                                                                           \
  position += STEP;                                                                                    \
  __syncwarp();                                                                                        \
  if (here + STAGES * STEP < end) FETCH(here + STAGES * STEP, stage)                                   \
  stage = stage + 1 == STAGES ? 0 : stage + 1;                                                         \
  turn ^= stage == 0;
