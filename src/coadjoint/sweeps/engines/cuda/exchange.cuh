// ---- what blocks exchange, and what they share out at the start

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

// The same for values that are multiplied as they are, WIDTH of them for each sample: they are copied to h, all at once
// and around the registers, and looked at there. Where a step has one item, the blocks of the group are just computing
// them: each warp first waits for one value of every block whose units it reads; shift is the first of these units.
#define COPIES (TENSOR && VEC == 4)
#define COPIES_STATES (COPIES && READS_ONE >= 0)
#if COPIES
__device__ __forceinline__ void copy_later(real* to, const real* from) {  // 16 bytes
#ifdef __CUDA_ARCH__
  const unsigned address = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
#else
  seen(from, to);
#endif
}
__device__ __forceinline__ void await_copies() {  // those of this thread
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
template <int WIDTH, class There, class From>
__device__ __forceinline__ void await_blocks(int shift, There there, From from) {
  int last = R - 1;  // sample of the item, whose values are written last
  while (last >= 0 && !there(last)) last--;
  if (last < 0) return;
#pragma unroll
  for (int q = threadIdx.x % 32; q < P; q += 32) {
    const int unit = min((q + 1) * U, D) - 1 - shift;  // the last of block q, among those that are read
    if (unit < 0 || unit >= DI + U - 1) continue;
    const volatile real* p = from(last, WIDTH - DI + min(unit, DI - 1));
    for (int spins = 0; absent(*p) && spins < SPINS; spins++) PAUSE();
  }
  SYNC_WARP();
}
template <int WIDTH, class There, class From>
struct Copies {
  static constexpr int count = TURNS(WIDTH);
  real* h;
  There there;
  From from;
  __device__ __forceinline__ static int place(int c) { return (threadIdx.x + c * NT) * 4; }  // of copy c of this thread
  __device__ __forceinline__ bool exists(int j) const { return j < R * WIDTH && there(j / WIDTH); }
  __device__ __forceinline__ real* target(int j) const { return h + j / WIDTH * IP + j % WIDTH; }
  __device__ __forceinline__ void ask(int j) const { copy_later(target(j), from(j / WIDTH, j % WIDTH)); }
  __device__ __forceinline__ bool complete(int j) const {
    const float4 y = *(const float4*)target(j);
    return !absent(y.x) && !absent(y.y) && !absent(y.z) && !absent(y.w);
  }
  // 32 copies, or those that remain, from number `first` on
  __device__ __forceinline__ void take(int first) const {
#pragma unroll 4
    for (int c = 0; c < min(32, count); c++)
      if (exists(place(first + c))) ask(place(first + c));
    await_copies();
    unsigned missing = 0;
#pragma unroll 4
    for (int c = 0; c < min(32, count); c++)
      if (exists(place(first + c)) && !complete(place(first + c))) missing |= 1u << c;
    for (int spins = 0; missing && spins < SPINS; spins++) {
      PAUSE();
#pragma unroll 1
      for (unsigned left = missing; left; left &= left - 1) ask(place(first + __ffs(left) - 1));
      await_copies();
#pragma unroll 1
      for (unsigned left = missing; left; left &= left - 1)
        if (complete(place(first + __ffs(left) - 1))) missing &= ~(left & -left);
    }
  }
};
template <int WIDTH, class There, class From>
__device__ __forceinline__ void copy_values(real* h, int shift, There there, From from) {
  if (ON_CHIP) await_blocks<WIDTH>(shift, there, from);
  const Copies<WIDTH, There, From> copies{h, there, from};
#pragma unroll 1
  for (int first = 0; first < copies.count; first += 32) copies.take(first);
}
#endif

// A cluster's blocks share out the inner entries, so that each reads only a part of the group's values. Each then has
// sums of a part of the products for all units of the cluster, and gives every block those that are for its own units.
// Sums of one item are written while those of the item before may still be read: there is room for two items.
#define OWN (OUTER / CLUSTER)  // sums that a block needs for its own units
#define SHARES (CLUSTER > 1 ? 2 * R * OUTER : 0)
#if CLUSTER > 1
__device__ __forceinline__ void meet_cluster() {  // what its blocks wrote before, all of them see afterwards
#ifdef __CUDA_ARCH__
  asm volatile("barrier.cluster.arrive;\n barrier.cluster.wait;" ::: "memory");
#elif defined(EMULATED)
  emulated_meeting();
#endif
}
__device__ __forceinline__ void give(int rank, real* to, real y) {  // to the same place in another block of the cluster
#ifdef __CUDA_ARCH__
  const unsigned here = (unsigned)__cvta_generic_to_shared(to);
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(y) : "memory");
#elif defined(EMULATED)
  emulated_gift(rank, to, y);
#endif
}
__device__ __forceinline__ void share_sums(const real* sums, real* shares, int rank, int i) {
  real* mine = shares + ((i % 2) * CLUSTER + rank) * (R * OWN);
  for (int j = threadIdx.x; j < R * OUTER; j += NT) {
    const int r = j / OUTER, outer = j % OUTER, unit = outer % CU;
    give(unit / U, mine + r * OWN + outer / CU * U + unit % U, summed(sums, r, outer));
  }
  meet_cluster();
}
__device__ __forceinline__ real total(const real*, const real* shares, int i, int r, int own) {
  real y = 0;
#pragma unroll
  for (int q = 0; q < CLUSTER; q++) y += shares[((i % 2) * CLUSTER + q) * (R * OWN) + r * OWN + own];
  return y;
}
#else
__device__ __forceinline__ void meet_cluster() {}
__device__ __forceinline__ void share_sums(const real*, real*, int, int) {}
__device__ __forceinline__ real total(const real* sums, const real*, int, int r, int own) { return summed(sums, r, own); }
#endif

#define SHARED()                                                                       \
  SHARED_MEMORY;                                                                       \
  real* h = (real*)shared;                    /* [R, IP] what W multiplies */          \
  real* more = h + R * IP;                    /* weights that registers do not hold */ \
  real* sums = more + MORE;                                                            \
  real* shares = sums + SUMS;                 /* [2, CLUSTER, R, OWN] of its blocks */ \
  const int part = blockIdx.x % P, group = blockIdx.x / P, first = group * (R * BLOCKS); \
  const int rank = part % CLUSTER, shift = rank * DI; /* the first unit that is read */ \
  const int end = (int)min((long long)(first + R * BLOCKS), a.B);                      \
  const int steps = a.LEN[first], items = steps * BLOCKS;                              \
  const Place mine = place();                                                          \
  Weights weights;                                                                     \
  if (NR) weights.load(a.W, part, BACKWARDS, mine, more);                              \
  for (int i = threadIdx.x; i < R * IP; i += NT) h[i] = 0;                             \
  meet_cluster(); /* nothing is given to a block before it has begun */                \
  __syncthreads();
