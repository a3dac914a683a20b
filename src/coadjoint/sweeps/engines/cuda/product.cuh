// ---- the product with W: inner entries are summed over, outer ones are the block's own

struct Place {
  int wk, lk, outer;  // which inner entries and which outer ones a thread has
};
__device__ __forceinline__ Place place() {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  return {warp / WC, lane / LC, (warp % WC) * LC * CC + lane % LC};
}
__device__ __forceinline__ int inner(const Place& p, int i) { return (p.wk * (KC / 4) * LK + (i / 4) * LK + p.lk) * 4 + i % 4; }
__device__ __forceinline__ real weight(const real* W, int in, int outer, int part, bool transposed) {
  // outer = block of W (gate, or read) * U + the unit's number
  const int unit = part * U + outer % U, which = outer / U;
  if (outer >= OUTER || unit >= D || in >= INNER) return 0;
  return transposed ? W[(long long)in * (NR * D) + which * D + unit] : W[(long long)(which * D + unit) * (NR * D) + in];
}
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

template <int N>
__device__ __forceinline__ void put(real* p, const real (*y)[N], int k) {  // entry k of VEC places side by side
#if VEC == 4
  *(float4*)p = float4{y[0][k], y[1][k], y[2][k], y[3][k]};
#else
  p[0] = y[0][k];
#endif
}

// The values that W multiplies, as the group exchanges them: N entries (slots) for each of WIDTH places of R samples.
// see() reads them as they are now; take() waits until all are written and passes them on, use(sample, first place,
// entries of VEC places). Few values are read in advance, all at once (at_once); many are read in batches.
#define TURNS(width) ((R * (width) / VEC + NT - 1) / NT)
template <int N, int WIDTH>
struct Gather {
  static constexpr int turns = TURNS(WIDTH), batch = turns * N * VEC <= 32 ? turns : (32 / (N * VEC) > 0 ? 32 / (N * VEC) : 1);
  static constexpr bool at_once = batch == turns;
  real y[batch][N][VEC];
  __device__ __forceinline__ static int place(int c) { return (threadIdx.x + c * NT) * VEC; }
  template <class There, class From>
  __device__ __forceinline__ void see(int first, There there, From from) {
#pragma unroll
    for (int c = 0; c < batch; c++) {
      const int j = place(first + c);
      if (j < R * WIDTH && there(j / WIDTH))
#pragma unroll
        for (int n = 0; n < N; n++)
          if (const real* p = from(j / WIDTH, j % WIDTH, n)) seen(p, y[c][n]);
    }
  }
  template <class There, class From, class Use>
  __device__ __forceinline__ void take(bool asked, There there, From from, Use use) {
#pragma unroll 1
    for (int first = 0; first < turns; first += batch) {
      if (!(at_once && asked)) see(first, there, from);
#pragma unroll
      for (int c = 0; c < batch; c++) {
        const int j = place(first + c);
        if (j < R * WIDTH && there(j / WIDTH)) {
#pragma unroll
          for (int n = 0; n < N; n++)
            if (const real* p = from(j / WIDTH, j % WIDTH, n)) awaited(p, y[c][n]);
          real z[VEC][N];
#pragma unroll
          for (int v = 0; v < VEC; v++)
#pragma unroll
            for (int n = 0; n < N; n++) z[v][n] = y[c][n][v];
          use(j / WIDTH, j % WIDTH, z);
        }
      }
    }
  }
};

#define SHARED()                                                                       \
  SHARED_MEMORY;                                                                       \
  real* h = (real*)shared;                    /* [R, IP] what W multiplies */          \
  real* more = h + R * IP;                    /* weights that registers do not hold */ \
  real* sums = more + (KC - KEEP) * CC * NT;  /* [WK, R, OUTER] */                     \
  const int part = blockIdx.x % P, group = blockIdx.x / P, first = group * (R * BLOCKS); \
  const int end = (int)min((long long)(first + R * BLOCKS), a.B);                      \
  const int steps = a.LEN[first], items = steps * BLOCKS;                              \
  const Place mine = place();                                                          \
  Weights weights;                                                                     \
  if (NR) weights.load(a.W, part, BACKWARDS, mine, more);                              \
  for (int i = threadIdx.x; i < R * IP; i += NT) h[i] = 0;                             \
  __syncthreads();

