// ---- the product with W by multiply-adds; inner entries are summed over, outer ones are the block's own

#define IP (WK * LK * KC)                  // the inner length, as the tile covers it
#define MORE ((KC - KEEP) * CC * NT)       // entries of W that registers do not hold
#define SUMS (WK * R * OUTER)

struct Place {
  int wk, lk, outer;  // which inner entries and which outer ones a thread has
};
__device__ __forceinline__ Place place() {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  return {warp / WC, lane / LC, (warp % WC) * LC * CC + lane % LC};
}
__device__ __forceinline__ int inner(const Place& p, int i) { return (p.wk * (KC / 4) * LK + (i / 4) * LK + p.lk) * 4 + i % 4; }
struct Weights {  // the first KEEP inner entries of a thread are in registers, the others in shared memory
  real w[KEEP][CC];
  real* more;  // [(KC - KEEP) / 4, CC, NT, 4]
  __device__ __forceinline__ real* spot(int i, int j) const { return more + (((i - KEEP) / 4 * CC + j) * NT + threadIdx.x) * 4 + i % 4; }
  __device__ __forceinline__ void load(const real* W, int part, bool transposed, const Place& p, real* more_) {
    more = more_;
#pragma unroll
    for (int i = 0; i < KEEP; i++)
#pragma unroll
      for (int j = 0; j < CC; j++) w[i][j] = weight(W, inner(p, i), p.outer + j * LC, part, transposed);
    for (int i = KEEP; i < KC; i++)
#pragma unroll
      for (int j = 0; j < CC; j++) *spot(i, j) = weight(W, inner(p, i), p.outer + j * LC, part, transposed);
  }
  __device__ __forceinline__ void four(const real* p, real* y) const {
#if DOUBLE
    *(double2*)y = *(const double2*)p; *(double2*)(y + 2) = *(const double2*)(p + 2);
#else
    *(float4*)y = *(const float4*)p;
#endif
  }
  __device__ __forceinline__ void product(const Place& p, const real* h, real* sums) const {
    real acc[R][CC];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int j = 0; j < CC; j++) acc[r][j] = 0;
    const auto add = [&](int i, const real (*v)[4]) {
#pragma unroll
      for (int r = 0; r < R; r++) {
        real y[4];
        four(h + r * IP + inner(p, i), y);
#pragma unroll
        for (int l = 0; l < 4; l++)
#pragma unroll
          for (int j = 0; j < CC; j++) acc[r][j] += y[l] * v[j][l];
      }
    };
#pragma unroll
    for (int i = 0; i < KEEP; i += 4) {
      real v[CC][4];
#pragma unroll
      for (int l = 0; l < 4; l++)
#pragma unroll
        for (int j = 0; j < CC; j++) v[j][l] = w[i + l][j];
      add(i, v);
    }
#pragma unroll 8
    for (int i = KEEP; i < KC; i += 4) {
      real v[CC][4];
#pragma unroll
      for (int j = 0; j < CC; j++) four(spot(i, j), v[j]);
      add(i, v);
    }
#pragma unroll
    for (int m = LC; m < 32; m *= 2)
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int j = 0; j < CC; j++) acc[r][j] += __shfl_xor_sync(0xffffffffu, acc[r][j], m);
    if (p.lk == 0)
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int j = 0; j < CC; j++)
          if (p.outer + j * LC < OUTER) sums[(p.wk * R + r) * OUTER + p.outer + j * LC] = acc[r][j];
  }
};
__device__ __forceinline__ real summed(const real* sums, int r, int outer) {
  real y = 0;
#pragma unroll
  for (int w = 0; w < WK; w++) y += sums[(w * R + r) * OUTER + outer];
  return y;
}
