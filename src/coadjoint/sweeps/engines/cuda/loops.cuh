// The three loops on a GPU. A group of P blocks owns the samples of some rows of the batch, each block U of their units
// and the part of W that belongs to them, in registers. Everything that is about the cell is written by cuda.py and
// included before this: real, D, U, P, G, S, NR, NP, NQ, ..., the shape of the tile, and the functions next, read, ...
//
// The blocks of a group exchange what W multiplies through memory, without a barrier: an array that is exchanged begins
// as MARK, a NaN that no arithmetic makes, and whoever needs an entry reads it until it is something else.
//
// An item is one step of R samples. A group of more samples takes BLOCKS items a step; its states then wait in memory.

#define ON_CHIP (BLOCKS == 1)
#define EXCHANGED (P > 1 || !ON_CHIP)
#define NT (32 * WC * WK)
#define IP (WK * LK * KC)                 // the inner length, as the tile covers it
#define EPT ((R * U + NT - 1) / NT)       // entries of an item that a thread computes
#define NONE (-(1 << 28))

struct Args {
  real *X, *A, *Q, *LAM, *DEL, *MU, *NU;
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

// What W multiplies, as the group exchanges it: N entries (slots) for each of WIDTH places of R samples.
// see(m) asks for those of item m; take(m, use) waits for them and hands them on, use(sample, first place, entries of VEC places).
// Where there are few of them they are asked for in advance (AT_ONCE); else they are read in batches.
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

// ---- forward: x_t = f(base_t + W r(x_{t-1}), v_t, x_{t-1}, p)

#ifdef FORWARD
KERNEL(forward) {
  SHARED();
  const auto there = [&](const Item& m) { return [&](int r) { return m.live && m.t < length(a, m.row + r, end, steps); }; };
  const auto from = [&](const Item& m) {
    return [&](int r, int unit, int s) { return READS_SLOT(s) ? a.X + (m.before + m.row + r) * (S * D) + s * D + unit : nullptr; };
  };
  Gather<S, D> gather;
  real x[EPT][S], p[EPT][NP + 1], ahead[AHEAD][EPT][NSTREAM + 1];
#pragma unroll
  for (int e = 0; e < EPT; e++) {
    const Entry y = entry(a, item(a, 0, steps, first, false), e, part, end, steps);
    parameters(a, y.unit, p[e]);
#pragma unroll
    for (int s = 0; s < S; s++) x[e][s] = y.n ? a.X[(long long)y.b * (S * D) + s * D + y.unit] : 0;
    if (NR && !EXCHANGED && y.act) {
      real q[NR + 1];
      read(x[e], q);
#pragma unroll
      for (int j = 0; j < NR; j++) h[y.r * IP + j * D + y.unit] = q[j];
    }
  }
#pragma unroll
  for (int j = 0; j < AHEAD; j++)
#pragma unroll
    for (int e = 0; e < EPT; e++) {
      const Item m = item(a, j, steps, first, false);
      fetch(a, m, entry(a, m, e, part, end, steps), ahead[j][e]);
    }
  for (int i = 0; i < items; i++) {
    const Item m = item(a, i, steps, first, false), later = item(a, i + AHEAD, steps, first, false);
    real now[EPT][NSTREAM + 1];
#pragma unroll
    for (int e = 0; e < EPT; e++) {
#pragma unroll
      for (int k = 0; k < NSTREAM; k++) {
        now[e][k] = ahead[0][e][k];
#pragma unroll
        for (int j = 1; j < AHEAD; j++) ahead[j - 1][e][k] = ahead[j][e][k];
      }
      fetch(a, later, entry(a, later, e, part, end, steps), ahead[AHEAD - 1][e]);
      if (!ON_CHIP) {
        const Entry y = entry(a, m, e, part, end, steps);
#pragma unroll
        for (int s = 0; s < S; s++)
          x[e][s] = y.act ? *(const volatile real*)(a.X + (m.before + y.b) * (S * D) + s * D + y.unit) : 0;
      }
    }
    if (NR) {
      if (EXCHANGED) {
        gather.take(i && !ON_CHIP, there(m), from(m), [&](int r, int unit, const real (*z)[S]) {
          real q[VEC][NR + 1];
#pragma unroll
          for (int v = 0; v < VEC; v++) read(z[v], q[v]);
#pragma unroll
          for (int k = 0; k < NR; k++) put<NR + 1>(h + r * IP + k * D + unit, q, k);
        });
      }
      __syncthreads();
      if (EXCHANGED && !ON_CHIP && gather.at_once) {
        const Item n = item(a, i + 1, steps, first, false);
        gather.see(0, there(n), from(n));
      }
      weights.product(mine, h, sums);
      __syncthreads();
    }
#pragma unroll
    for (int e = 0; e < EPT; e++) {
      const Entry y = entry(a, m, e, part, end, steps);
      if (y.act) {
        real g[G], q[NQ + 1], z[S];
#pragma unroll
        for (int k = 0; k < G; k++) g[k] = now[e][k] + (NR ? summed(sums, y.r, k * U + y.ul) : 0);
        next(g, now[e] + G, x[e], p[e], z, q);
        real* to = a.X + (m.after + y.b) * (S * D) + y.unit;
#pragma unroll
        for (int s = 0; s < S; s++) { to[s * D] = z[s]; x[e][s] = z[s]; }
#pragma unroll
        for (int k = 0; k < NQ; k++) a.Q[(m.after - a.B + y.b) * (NQ * D) + k * D + y.unit] = q[k];
#if NEEDS_A
#pragma unroll
        for (int k = 0; k < G; k++) a.A[(m.after - a.B + y.b) * (G * D) + k * D + y.unit] = g[k];
#endif
        if (NR && !EXCHANGED) {
          real rr[NR + 1];
          read(z, rr);
#pragma unroll
          for (int j = 0; j < NR; j++) h[y.r * IP + j * D + y.unit] = rr[j];
        }
      }
    }
  }
}
#endif

// ---- tangent: nu_t = ga_t + W r' m_t,  mu_t = g_t + f_x m_t + f_a nu_t,  m_t = link_t mu_{t-1}

#ifdef TANGENT
__device__ __forceinline__ real link(const Args& a, long long row) { return HAS_LINK ? a.LINK[row] : (real)1; }
KERNEL(tangent) {
  SHARED();
  const auto there = [&](const Item& m) { return [&](int r) { return m.live && m.t < length(a, m.row + r, end, steps); }; };
  const auto from = [&](const Item& m) {
    return [&](int r, int unit, int s) { return ALONG_SLOT(s) ? a.MU + (m.before + m.row + r) * (S * D) + s * D + unit : nullptr; };
  };
  Gather<S, D> gather;
  real mu[EPT][S], p[EPT][NP + 1], ahead[AHEAD][EPT][NSTREAM + 1];
#pragma unroll
  for (int e = 0; e < EPT; e++) {
    const Entry y = entry(a, item(a, 0, steps, first, false), e, part, end, steps);
    parameters(a, y.unit, p[e]);
#pragma unroll
    for (int s = 0; s < S; s++) mu[e][s] = y.n ? a.MU[(long long)y.b * (S * D) + s * D + y.unit] : 0;
  }
#pragma unroll
  for (int j = 0; j < AHEAD; j++)
#pragma unroll
    for (int e = 0; e < EPT; e++) {
      const Item m = item(a, j, steps, first, false);
      fetch(a, m, entry(a, m, e, part, end, steps), ahead[j][e]);
    }
  for (int i = 0; i < items; i++) {
    const Item m = item(a, i, steps, first, false), later = item(a, i + AHEAD, steps, first, false);
    real now[EPT][NSTREAM + 1];
#pragma unroll
    for (int e = 0; e < EPT; e++) {
#pragma unroll
      for (int k = 0; k < NSTREAM; k++) {
        now[e][k] = ahead[0][e][k];
#pragma unroll
        for (int j = 1; j < AHEAD; j++) ahead[j - 1][e][k] = ahead[j][e][k];
      }
      fetch(a, later, entry(a, later, e, part, end, steps), ahead[AHEAD - 1][e]);
      const Entry y = entry(a, m, e, part, end, steps);
      if (!ON_CHIP) {
#pragma unroll
        for (int s = 0; s < S; s++)
          mu[e][s] = y.act ? *(const volatile real*)(a.MU + (m.before + y.b) * (S * D) + s * D + y.unit) : 0;
      }
      if (y.act) {
#pragma unroll
        for (int s = 0; s < S; s++) mu[e][s] *= HAS_LINK ? now[e][FIRST_LINK] : (real)1;
        if (NR && !EXCHANGED) {
          real q[NR + 1];
          along(mu[e], now[e], q);
#pragma unroll
          for (int j = 0; j < NR; j++) h[y.r * IP + j * D + y.unit] = q[j];
        }
      }
    }
    if (NR) {
      if (EXCHANGED) {
        real factor[R];
#pragma unroll
        for (int r = 0; r < R; r++) factor[r] = there(m)(r) ? link(a, m.after - a.B + m.row + r) : 0;
        gather.take(i && !ON_CHIP, there(m), from(m), [&](int r, int unit, const real (*z)[S]) {
          real q[VEC][NR + 1], l = 1;
#pragma unroll
          for (int k = 0; k < R; k++) if (k == r) l = factor[k];
#pragma unroll
          for (int v = 0; v < VEC; v++) {
            real x[S], y[S];
#pragma unroll
            for (int s = 0; s < S; s++) {
              y[s] = z[v][s] * l;
              x[s] = ALONG_STATE(s) ? a.X[(m.before + m.row + r) * (S * D) + s * D + unit + v] : 0;
            }
            along_at(y, x, q[v]);
          }
#pragma unroll
          for (int k = 0; k < NR; k++) put<NR + 1>(h + r * IP + k * D + unit, q, k);
        });
      }
      __syncthreads();
      if (EXCHANGED && !ON_CHIP && gather.at_once) {
        const Item n = item(a, i + 1, steps, first, false);
        gather.see(0, there(n), from(n));
      }
      weights.product(mine, h, sums);
      __syncthreads();
    }
#pragma unroll
    for (int e = 0; e < EPT; e++) {
      const Entry y = entry(a, m, e, part, end, steps);
      if (y.act) {
        real nu[G], z[S];
#pragma unroll
        for (int k = 0; k < G; k++) {
          nu[k] = (NR ? summed(sums, y.r, k * U + y.ul) : 0) + (HAS_SA ? now[e][FIRST_SA + k] : 0);
          a.NU[(m.after - a.B + y.b) * (G * D) + k * D + y.unit] = nu[k];
        }
        change(mu[e], nu, now[e], p[e], z);
#pragma unroll
        for (int s = 0; s < S; s++) {
          mu[e][s] = z[s] + (HAS_S ? now[e][FIRST_S + s] : 0);
          a.MU[(m.after + y.b) * (S * D) + s * D + y.unit] = mu[e][s];
        }
      }
    }
  }
}
#endif

// ---- adjoint: del_t = sa_t + f_a' lam_t,  lam_{t-1} = s_{t-1} + link_t (f_x' lam_t + r' W' del_t)

#ifdef ADJOINT
// The first half of an item: del_t, what f_x' lam_t keeps, and how large lam_t is.
struct Half {
  real lam[EPT][S], kept[EPT][S], now[EPT][NSTREAM + 1];
  int k[EPT];
};
__device__ __forceinline__ void first_half(
    const Args& a, const Item& m, Half& y, real (*p)[NP + 1], real* h, unsigned* tops, int* exponents, int part, int end, int steps, int first) {
  unsigned found[R];
#pragma unroll
  for (int r = 0; r < R; r++) found[r] = 0;
#pragma unroll
  for (int e = 0; e < EPT; e++) {
    const Entry q = entry(a, m, e, part, end, steps);
    if (q.act) {
      if (!ON_CHIP) {
#pragma unroll
        for (int s = 0; s < S; s++) y.lam[e][s] = *(const volatile real*)(a.LAM + (m.after + q.b) * (S * D) + s * D + q.unit);
        if (SCALED) y.k[e] = exponents[q.b - first];
      }
      if (q.n == m.t + 1) {  // the sample begins here, with its source
        if (SCALED) {
          y.k[e] = NONE;
          if (HAS_S) y.k[e] = a.KS[m.after + q.b];
          if (HAS_LAST) y.k[e] = max(y.k[e], a.KEND[q.b]);
          if (y.k[e] == NONE) y.k[e] = a.KLAST[q.b];
        }
#pragma unroll
        for (int s = 0; s < S; s++) {
          real source = 0;
          if (HAS_S) {
            const real given = a.SRC[(m.after + q.b) * (S * D) + s * D + q.unit];
            source += SCALED ? scaled(given, -y.k[e]) : given;
          }
          if (HAS_LAST) {
            const real given = a.LAST[(long long)q.b * (S * D) + s * D + q.unit];
            source += SCALED ? scaled(given, a.KLAST[q.b] - y.k[e]) : given;
          }
          y.lam[e][s] = source;
          a.LAM[(m.after + q.b) * (S * D) + s * D + q.unit] = source;
        }
        if (SCALED && q.unit == 0) a.K[m.after + q.b] = y.k[e];
      }
      real del[G];
      pull(y.lam[e], y.now[e], p[e], del, y.kept[e]);
#pragma unroll
      for (int g = 0; g < G; g++) {
        if (HAS_SA) del[g] += y.now[e][FIRST_SA + g];
        a.DEL[(m.after - a.B + q.b) * (G * D) + g * D + q.unit] = del[g];
        if (NR && !EXCHANGED) h[q.r * IP + g * D + q.unit] = del[g];
      }
      if (SCALED) {
        unsigned top = 0;
#pragma unroll
        for (int s = 0; s < S; s++)
          if (y.lam[e][s] != 0) top = max(top, (unsigned)(exponent(y.lam[e][s]) + 4096));
#pragma unroll
        for (int r = 0; r < R; r++)
          if (r == q.r) found[r] = max(found[r], top);
      }
    }
  }
  if (SCALED)
#pragma unroll
    for (int r = 0; r < R; r++) {
      const unsigned top = __reduce_max_sync(0xffffffffu, found[r]);
      if (threadIdx.x % 32 == 0) atomicMax(tops + r, top);
    }
}
#define LEAD (ON_CHIP ? 0 : BLOCKS == 2 ? 1 : 2)  // items by which first halves run ahead of second ones
KERNEL(adjoint) {
  SHARED();
  const auto there = [&](const Item& m) { return [&](int r) { return m.live && m.t < length(a, m.row + r, end, steps); }; };
  const auto from = [&](const Item& m) {
    return [&](int r, int index, int) { return (const real*)a.DEL + (m.after - a.B + m.row + r) * (G * D) + index; };
  };
  Gather<1, G * D> gather;
  unsigned* tops = (unsigned*)(sums + WK * R * OUTER);  // [4, R] the largest exponent of lam in this block, by item
  unsigned* all = tops + 4 * R;                         // [R] and in the group
  int* exponents = (int*)(all + R);                     // [R BLOCKS] of the samples, where the state waits in memory
  for (int i = threadIdx.x; i < 4 * R; i += NT) tops[i] = 0;
  for (int i = threadIdx.x; i < R * BLOCKS; i += NT) exponents[i] = 0;
  __syncthreads();
  real p[EPT][NP + 1], ahead[AHEAD][EPT][NSTREAM + 1];
  Half halves[LEAD + 1];  // of this item and of those whose first half is done
  Half& y = halves[0];
#pragma unroll
  for (int e = 0; e < EPT; e++) {
    parameters(a, entry(a, item(a, 0, steps, first, true), e, part, end, steps).unit, p[e]);
    y.k[e] = 0;
#pragma unroll
    for (int s = 0; s < S; s++) y.lam[e][s] = 0;
  }
#pragma unroll
  for (int j = 0; j < AHEAD; j++)
#pragma unroll
    for (int e = 0; e < EPT; e++) {
      const Item m = item(a, j, steps, first, true);
      fetch(a, m, entry(a, m, e, part, end, steps), ahead[j][e]);
    }
  for (int i = -LEAD; i < items; i++) {
    const int newest = i + LEAD;
    const Item m = item(a, max(i, 0), steps, first, true), n = item(a, newest, steps, first, true);
    const Item later = item(a, newest + AHEAD, steps, first, true);
    Half& target = halves[LEAD];
#pragma unroll
    for (int e = 0; e < EPT; e++) {
#pragma unroll
      for (int k = 0; k < NSTREAM; k++) {
        target.now[e][k] = ahead[0][e][k];
#pragma unroll
        for (int j = 1; j < AHEAD; j++) ahead[j - 1][e][k] = ahead[j][e][k];
      }
      fetch(a, later, entry(a, later, e, part, end, steps), ahead[AHEAD - 1][e]);
    }
    first_half(a, n, target, p, h, tops + newest % 4 * R, exponents, part, end, steps, first);
    if (SCALED && P > 1) {
      __syncthreads();
      if (threadIdx.x < R && there(n)(threadIdx.x))
        *(volatile int*)(a.TOPS + (n.after - a.B + n.row + threadIdx.x) * P + part) = (int)tops[newest % 4 * R + threadIdx.x];
    }
    if (i < 0) {
#pragma unroll
      for (int l = 0; l < LEAD; l++) halves[l] = halves[l + 1];
      continue;
    }
    if (NR && EXCHANGED)
      gather.take(i && !ON_CHIP, there(m), from(m), [&](int r, int index, const real (*z)[1]) { put<1>(h + r * IP + index, z, 0); });
    if (SCALED && P > 1) {
      for (int r = threadIdx.x / 32; r < R; r += NT / 32) {
        unsigned top = 0;
        if (m.t < length(a, m.row + r, end, steps))
          for (int q = threadIdx.x % 32; q < P; q += 32) {
            const volatile int* at = (const volatile int*)(a.TOPS + (m.after - a.B + m.row + r) * P + q);
            int found = *at;
            for (int spins = 0; found < 0 && spins < SPINS; spins++) { PAUSE(); found = *at; }
            top = max(top, (unsigned)max(found, 0));
          }
        top = __reduce_max_sync(0xffffffffu, top);
        if (threadIdx.x % 32 == 0) all[r] = top;
      }
    }
    __syncthreads();
    if (SCALED && threadIdx.x < R) tops[(newest + 1) % 4 * R + threadIdx.x] = 0;
    if (NR && EXCHANGED && !ON_CHIP && gather.at_once) {
      const Item q = item(a, i + 1, steps, first, true);
      gather.see(0, there(q), from(q));
    }
    if (NR) weights.product(mine, h, sums);
    if (NR || SCALED) __syncthreads();
#pragma unroll
    for (int e = 0; e < EPT; e++) {
      const Entry q = entry(a, m, e, part, end, steps);
      if (q.act) {
        real rbar[NR + 1], back[S];
#pragma unroll
        for (int j = 0; j < NR; j++) rbar[j] = summed(sums, q.r, j * U + q.ul);
        pull_read(rbar, y.now[e], p[e], back);
        int k = y.k[e];
        real up = 1;
        if (SCALED) {
          const unsigned top = P > 1 ? all[q.r] : tops[i % 4 * R + q.r];
          int mine_k = top ? k + (int)top - 4096 : NONE;
          if (HAS_S) mine_k = max(mine_k, a.KS[m.before + q.b]);
          if (mine_k == NONE) mine_k = k;
          up = power_of_two(k - mine_k);
          k = mine_k;
          if (q.unit == 0) a.K[m.before + q.b] = k;
          if (!ON_CHIP && q.ul == 0) exponents[q.b - first] = k;
          y.k[e] = k;
        }
        if (HAS_LINK) up *= y.now[e][FIRST_LINK];
#pragma unroll
        for (int s = 0; s < S; s++) {
          real value = (y.kept[e][s] + back[s]) * up;
          if (HAS_S) value += SCALED ? scaled(y.now[e][FIRST_S + s], -k) : y.now[e][FIRST_S + s];
          a.LAM[(m.before + q.b) * (S * D) + s * D + q.unit] = value;
          y.lam[e][s] = value;
        }
      }
    }
    if (!ON_CHIP) {
      if (BLOCKS == LEAD + 1) __syncthreads();  // the next first half reads the exponents that this second half wrote
#pragma unroll
      for (int l = 0; l < LEAD; l++) halves[l] = halves[l + 1];
    }
  }
}
#endif
