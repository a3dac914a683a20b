// ---- the product with W by tensor cores; inner entries are summed over, outer ones are the block's own
//
// W h for R samples, in float32: each factor is the sum of two tf32 numbers, y = high + low, and of the four products
// all but low low are added. Sums over more than 16 inner entries are those of float32 registers.
//
// A warp multiplies MT tiles of 16 outer entries with CHUNKS chunks of 16 inner ones. The warps lie as WC x WK: WC of them
// share out the outer entries, and WK the inner ones. The instruction multiplies 16 x 8 entries of W with those of 8 samples. Which of the inner entries of
// a chunk it takes first is free: a lane takes four that lie side by side in h, two for each of two instructions.

#define IP (16 * CHUNKS * WK + 16)            // values of a sample; 16 more, so that lanes read from all banks
#define MORE ((CHUNKS - KEEP) * MT * 8 * NT)  // entries of W that registers do not hold
#define STRIDE (16 * MT * WC + 4)             // sums of a sample; 4 more, so that lanes write to all banks
#define SUMS (WK * R * STRIDE)
#define SAMPLES (R / 8)                       // tiles of 8 samples

struct Place {
  int wk, wc, row, column;  // of a warp, and of a lane: a row of eight, and one of four columns
};
__device__ __forceinline__ Place place() {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  return {warp / WC, warp % WC, lane / 4, lane % 4};
}
// y = high + low: high is y rounded to the 11 digits of tf32. Of low the instruction reads the first 11 digits.
__device__ __forceinline__ void split(real y, unsigned* high, unsigned* low) {
  *high = (__float_as_int(y) + 0x1000u) & 0xffffe000u;
  *low = __float_as_int(y - __int_as_float((int)*high));
}
// sum [16, 8] += a [16, 8] b [8, 8]
__device__ __forceinline__ void multiply(real* sum, const unsigned* a, const unsigned* b) {
#ifdef __CUDA_ARCH__
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif defined(EMULATED)
  emulated_multiply(sum, a, b);
#endif
}
struct Weights {  // the first KEEP chunks of a thread are in registers, the others in shared memory
  real w[KEEP][MT][8];
  real* more;  // [CHUNKS - KEEP, MT, 2, NT, 4]
  __device__ __forceinline__ real* spot(int c, int m, int half) const {
    return more + (((c - KEEP) * MT + m) * 2 + half) * (NT * 4) + threadIdx.x * 4;
  }
  __device__ __forceinline__ static int inner(const Place& p, int c) { return (p.wk * CHUNKS + c) * 16 + p.column * 4; }
  __device__ __forceinline__ static int outer(const Place& p, int m) { return (p.wc * MT + m) * 16 + p.row; }
  __device__ __forceinline__ static real entry_of(const real* W, int part, bool transposed, const Place& p, int c, int m, int i) {
    // i = 0 .. 3 for the first instruction: (row, column), (row + 8, column), then both with the next column
    return weight(W, inner(p, c) + i / 4 * 2 + i % 4 / 2, outer(p, m) + i % 2 * 8, part, transposed);
  }
  __device__ __forceinline__ void load(const real* W, int part, bool transposed, const Place& p, real* more_) {
    more = more_;
#pragma unroll
    for (int c = 0; c < KEEP; c++)
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int i = 0; i < 8; i++) w[c][m][i] = entry_of(W, part, transposed, p, c, m, i);
    for (int c = KEEP; c < CHUNKS; c++)
      for (int m = 0; m < MT; m++)
        for (int i = 0; i < 8; i++) spot(c, m, i / 4)[i % 4] = entry_of(W, part, transposed, p, c, m, i);
  }
  // adds what chunk c gives to the sums; kept: it is in registers, and c a constant
  template <bool kept>
  __device__ __forceinline__ void add(const Place& p, int c, const real* h, real (*total)[SAMPLES][4]) const {
    unsigned b_high[SAMPLES][4], b_low[SAMPLES][4];
#pragma unroll
    for (int n = 0; n < SAMPLES; n++) {
      const float4 y = *(const float4*)(h + (8 * n + p.row) * IP + inner(p, c));
      const real four[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; i++) split(four[i], &b_high[n][i], &b_low[n][i]);
    }
#pragma unroll
    for (int m = 0; m < MT; m++) {
      real v[8];
      if (kept) {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = w[c][m][i];
      } else {
        *(float4*)v = *(const float4*)spot(c, m, 0);
        *(float4*)(v + 4) = *(const float4*)spot(c, m, 1);
      }
      unsigned a_high[8], a_low[8];
#pragma unroll
      for (int i = 0; i < 8; i++) split(v[i], &a_high[i], &a_low[i]);
#pragma unroll
      for (int n = 0; n < SAMPLES; n++) {
        real large[4] = {0, 0, 0, 0}, small[4] = {0, 0, 0, 0};  // apart, so that no instruction waits for many others
#pragma unroll
        for (int half = 0; half < 2; half++) {
          multiply(small, a_low + 4 * half, b_high[n] + 2 * half);
          multiply(large, a_high + 4 * half, b_high[n] + 2 * half);
          multiply(small, a_high + 4 * half, b_low[n] + 2 * half);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) total[m][n][i] += large[i] + small[i];
      }
    }
  }
  __device__ __forceinline__ void product(const Place& p, const real* h, real* sums) const {
    real total[MT][SAMPLES][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < SAMPLES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) total[m][n][i] = 0;
#pragma unroll
    for (int c = 0; c < KEEP; c++) add<true>(p, c, h, total);
#pragma unroll 2
    for (int c = KEEP; c < CHUNKS; c++) add<false>(p, c, h, total);
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < SAMPLES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int sample = 8 * n + 2 * p.column + i % 2;
          sums[(p.wk * R + sample) * STRIDE + outer(p, m) + i / 2 * 8] = total[m][n][i];
        }
  }
};
__device__ __forceinline__ real summed(const real* sums, int r, int outer) {
  real y = 0;
#pragma unroll
  for (int w = 0; w < WK; w++) y += sums[(w * R + r) * STRIDE + outer];
  return y;
}
