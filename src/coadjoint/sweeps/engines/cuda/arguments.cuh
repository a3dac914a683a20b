// The three loops on a GPU. A group of P blocks owns some samples of the batch; each block owns U of their units and
// keeps the part of W that belongs to them in registers. source.py writes what depends on the cell, before this file:
// real, D, U, P, G, S, NR, NP, NQ, ..., the shape of the tile, and the functions next, read, ...
//
// The blocks of a group exchange the values that W multiplies through memory, without a barrier: an exchanged array is
// filled with MARK, a NaN that no arithmetic makes, and a reader reads an entry again until it is not MARK.
//
// An item is one step of R samples. A group of more samples takes BLOCKS items a step; its states then wait in memory.

#define ON_CHIP (BLOCKS == 1)
#define EXCHANGED (P > 1 || !ON_CHIP)
#define NT (32 * WC * WK)
#define EPT ((R * U + NT - 1) / NT)       // entries of an item that a thread computes
#define NONE (-(1 << 28))

// CLUSTER blocks of a group, side by side, form a cluster: they can write to each other's shared memory. Together they
// have the rows of W of CU units, and each multiplies them with the values of DI units (see share_sums).
#define CU (CLUSTER * U)
#define DI (D / CLUSTER)
#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

struct Args {
  real *X, *A, *Q, *LAM, *DEL, *MU, *NU, *ALONG;
  const real *BASE, *V, *W, *PAR, *SRC, *LAST, *SA, *LINK;
  int *K, *TOPS;
  const int *KS, *KEND, *KLAST, *LEN;
  const long long* STARTS;
  long long B;
};

// ---- numbers

__device__ __forceinline__ int exponent(real y) {  // e with 2^(e-1) <= |y| < 2^e, y not 0
#if DOUBLE
  return (int)((__double_as_longlong(y) >> 52) & 2047) - 1022;
#else
  return (int)((__float_as_int(y) >> 23) & 255) - 126;
#endif
}
__device__ __forceinline__ real power_of_two(int k) {  // exactly; 0 below the normal range
#if DOUBLE
  return __longlong_as_double((long long)(min(max(k, -1023), 1023) + 1023) << 52);
#else
  return __int_as_float((min(max(k, -127), 127) + 127) << 23);
#endif
}
__device__ __forceinline__ real scaled(real y, int k) {  // y 2^k, where 2^k may be out of range
  const int h = k >> 1;
  return y * power_of_two(h) * power_of_two(k - h);
}
__device__ __forceinline__ bool absent(real y) {
#if DOUBLE
  return __double_as_longlong(y) == MARK;
#else
  return __float_as_int(y) == MARK;
#endif
}
__device__ __forceinline__ void seen(const real* p, real* y) {  // VEC entries, as they are now
#if VEC == 4 && defined(__CUDA_ARCH__)
  asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(y[0]), "=f"(y[1]), "=f"(y[2]), "=f"(y[3]) : "l"(p) : "memory");
#else
#pragma unroll
  for (int v = 0; v < VEC; v++) y[v] = *(const volatile real*)(p + v);
#endif
}
__device__ __forceinline__ void awaited(const real* p, real* y) {  // once all of them have been written
  for (int spins = 0; spins < SPINS; spins++) {
    bool missing = false;
#pragma unroll
    for (int v = 0; v < VEC; v++) missing |= absent(y[v]);
    if (!missing) return;
    PAUSE();
    seen(p, y);
  }
}

// ---- which rows

struct Item {
  int t;                   // the step, from 0
  int row;                 // first sample
  long long before, after; // where the states before and after the step begin
  bool live;
};
__device__ __forceinline__ long long state(const Args& a, int t) { return UNIFORM ? t * a.B : a.STARTS[t]; }
__device__ __forceinline__ Item item(const Args& a, int i, int steps, int first, bool backwards) {
  Item m;
  const int s = BLOCKS == 1 ? i : i / BLOCKS;
  m.live = s < steps;
  m.t = min(s, steps - 1);
  if (backwards) m.t = steps - 1 - m.t;
  m.row = BLOCKS == 1 ? first : first + (i % BLOCKS) * R;
  m.before = state(a, m.t);
  m.after = state(a, m.t + 1);
  return m;
}
__device__ __forceinline__ int length(const Args& a, int b, int end, int steps) {
  return b >= end ? 0 : UNIFORM ? steps : a.LEN[b];
}

// One entry of an item: a sample and a unit.
struct Entry {
  int r, ul, unit, b, n;
  bool act;
};
__device__ __forceinline__ Entry entry(const Args& a, const Item& m, int e, int part, int end, int steps) {
  Entry y;
  const int index = threadIdx.x + e * NT;
  y.r = index / U;
  y.ul = index % U;
  y.unit = part * U + y.ul;
  y.b = m.row + y.r;
  const bool there = y.r < R && y.unit < D;
  y.n = there ? length(a, y.b, end, steps) : 0;
  y.act = m.live && m.t < y.n;
  return y;
}

// ---- which part of W

__device__ __forceinline__ real weight(const real* W, int in, int outer, int part, bool transposed) {
  // outer = block of W (gate, or read) * CU + a unit of the cluster's, in = block of W * DI + a unit that the block reads
  const int unit = part / CLUSTER * CU + outer % CU, which = outer / CU;
  if (outer >= OUTER || unit >= D || in >= INNER) return 0;
  const int row = which * D + unit, column = in / DI * D + part % CLUSTER * DI + in % DI;
  return transposed ? W[(long long)column * (NR * D) + row] : W[(long long)row * (NR * D) + column];
}
