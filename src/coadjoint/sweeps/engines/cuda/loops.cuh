// ---- forward: x_t = f(base_t + W r(x_{t-1}), v_t, x_{t-1}, p)

#ifdef FORWARD
KERNEL(forward) {
  SHARED();
  const auto there = [&](const Item& m) { return [&](int r) { return m.live && m.t < length(a, m.row + r, end, steps); }; };
  const auto from = [&](const Item& m) {
    return [&](int r, int unit, int s) { return READS_SLOT(s) ? a.X + (m.before + m.row + r) * (S * D) + s * D + shift + unit : nullptr; };
  };
#if !COPIES_STATES
  Gather<S, DI> gather;
#endif
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
#if COPIES_STATES
      if (EXCHANGED) copy_values<DI>(h, shift, there(m), [&](int r, int unit) { return from(m)(r, unit, READS_ONE); });
      __syncthreads();
#else
      if (EXCHANGED) {
        gather.take(i && !ON_CHIP, there(m), from(m), [&](int r, int unit, const real (*z)[S]) {
          real q[VEC][NR + 1];
#pragma unroll
          for (int v = 0; v < VEC; v++) read(z[v], q[v]);
#pragma unroll
          for (int k = 0; k < NR; k++) put<NR + 1>(h + r * IP + k * DI + unit, q, k);
        });
      }
      __syncthreads();
      if (EXCHANGED && !ON_CHIP && gather.at_once) {
        const Item n = item(a, i + 1, steps, first, false);
        gather.see(0, there(n), from(n));
      }
#endif
      weights.product(mine, h, sums);
      __syncthreads();
      share_sums(sums, shares, rank, i);
    }
#pragma unroll
    for (int e = 0; e < EPT; e++) {
      const Entry y = entry(a, m, e, part, end, steps);
      if (y.act) {
        real g[G], q[NQ + 1], z[S];
#pragma unroll
        for (int k = 0; k < G; k++) g[k] = now[e][k] + (NR ? total(sums, shares, i, y.r, k * U + y.ul) : 0);
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
//
// Blocks exchange mu. Where W reads one slot of m, and values are copied as they are, they exchange that slot of m instead.

#ifdef TANGENT
#define PASSES_ON (COPIES_STATES && HAS_LINK)
__device__ __forceinline__ real link(const Args& a, long long row) { return HAS_LINK ? a.LINK[row] : (real)1; }
KERNEL(tangent) {
  SHARED();
  const auto there = [&](const Item& m) { return [&](int r) { return m.live && m.t < length(a, m.row + r, end, steps); }; };
  const auto from = [&](const Item& m) {
    return [&](int r, int unit, int s) {
      const long long row = m.before + m.row + r;
      if (PASSES_ON) return a.ALONG + row * D + shift + unit;
      return ALONG_SLOT(s) ? a.MU + row * (S * D) + s * D + shift + unit : nullptr;
    };
  };
#if !COPIES_STATES
  Gather<S, DI> gather;
#endif
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
    real now[EPT][NSTREAM + 1], next_link[EPT];
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
      const bool goes_on = PASSES_ON && EXCHANGED && y.act && m.t + 1 < y.n;
      next_link[e] = goes_on ? link(a, state(a, m.t + 2) - a.B + y.b) : 0;
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
#if COPIES_STATES
      if (EXCHANGED) copy_values<DI>(h, shift, there(m), [&](int r, int unit) { return from(m)(r, unit, READS_ONE); });
      __syncthreads();
#else
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
              x[s] = ALONG_STATE(s) ? a.X[(m.before + m.row + r) * (S * D) + s * D + shift + unit + v] : 0;
            }
            along_at(y, x, q[v]);
          }
#pragma unroll
          for (int k = 0; k < NR; k++) put<NR + 1>(h + r * IP + k * DI + unit, q, k);
        });
      }
      __syncthreads();
      if (EXCHANGED && !ON_CHIP && gather.at_once) {
        const Item n = item(a, i + 1, steps, first, false);
        gather.see(0, there(n), from(n));
      }
#endif
      weights.product(mine, h, sums);
      __syncthreads();
      share_sums(sums, shares, rank, i);
    }
#pragma unroll
    for (int e = 0; e < EPT; e++) {
      const Entry y = entry(a, m, e, part, end, steps);
      if (y.act) {
        real nu[G], z[S];
#pragma unroll
        for (int k = 0; k < G; k++) {
          nu[k] = (NR ? total(sums, shares, i, y.r, k * U + y.ul) : 0) + (HAS_SA ? now[e][FIRST_SA + k] : 0);
          a.NU[(m.after - a.B + y.b) * (G * D) + k * D + y.unit] = nu[k];
        }
        change(mu[e], nu, now[e], p[e], z);
#pragma unroll
        for (int s = 0; s < S; s++) {
          mu[e][s] = z[s] + (HAS_S ? now[e][FIRST_S + s] : 0);
          a.MU[(m.after + y.b) * (S * D) + s * D + y.unit] = mu[e][s];
        }
        if (PASSES_ON && EXCHANGED && m.t + 1 < y.n)
          a.ALONG[(m.after + y.b) * D + y.unit] = mu[e][max(READS_ONE, 0)] * next_link[e];
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
#define TOP_ROWS ((R + NT / 32 - 1) / (NT / 32))  // samples whose exponent a warp finds, and exponents that a lane reads
#define TOP_PARTS ((P + 31) / 32)
#define LEAD (ON_CHIP ? 0 : BLOCKS == 2 ? 1 : 2)  // items by which first halves run ahead of second ones
KERNEL(adjoint) {
  SHARED();
  const auto there = [&](const Item& m) { return [&](int r) { return m.live && m.t < length(a, m.row + r, end, steps); }; };
  const auto from = [&](const Item& m) {
    return [&](int r, int index, int) {
      return (const real*)a.DEL + (m.after - a.B + m.row + r) * (G * D) + index / DI * D + shift + index % DI;
    };
  };
#if !COPIES
  Gather<1, G * DI> gather;
#endif
  unsigned* tops = (unsigned*)(shares + SHARES);  // [4, R] the largest exponent of lam in this block, by item
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
    // The exponents of the group's blocks: asked for before the values, which arrive meanwhile.
    const auto awaits_top = [&](int r) { return r < R && m.t < length(a, m.row + r, end, steps); };
    const auto top_of = [&](int r, int q) { return (const volatile int*)(a.TOPS + (m.after - a.B + m.row + r) * P + q); };
    int heard[TOP_ROWS][TOP_PARTS];
    if (SCALED && P > 1) {
#pragma unroll
      for (int j = 0; j < TOP_ROWS; j++)
#pragma unroll
        for (int l = 0; l < TOP_PARTS; l++) {
          const int r = threadIdx.x / 32 + j * (NT / 32), q = threadIdx.x % 32 + l * 32;
          heard[j][l] = awaits_top(r) && q < P ? *top_of(r, q) : 0;
        }
    }
#if COPIES
    if (NR && EXCHANGED) copy_values<G * DI>(h, shift, there(m), [&](int r, int index) { return from(m)(r, index, 0); });
#else
    if (NR && EXCHANGED)
      gather.take(i && !ON_CHIP, there(m), from(m), [&](int r, int index, const real (*z)[1]) { put<1>(h + r * IP + index, z, 0); });
#endif
    if (SCALED && P > 1) {
#pragma unroll
      for (int j = 0; j < TOP_ROWS; j++) {
        const int r = threadIdx.x / 32 + j * (NT / 32);
        unsigned top = 0;
        if (awaits_top(r))
#pragma unroll
          for (int l = 0; l < TOP_PARTS; l++) {
            const int q = threadIdx.x % 32 + l * 32;
            if (q >= P) continue;
            for (int spins = 0; heard[j][l] < 0 && spins < SPINS; spins++) { PAUSE(); heard[j][l] = *top_of(r, q); }
            top = max(top, (unsigned)max(heard[j][l], 0));
          }
        top = __reduce_max_sync(0xffffffffu, top);
        if (threadIdx.x % 32 == 0 && r < R) all[r] = top;
      }
    }
    __syncthreads();
    if (SCALED && threadIdx.x < R) tops[(newest + 1) % 4 * R + threadIdx.x] = 0;
#if !COPIES
    if (NR && EXCHANGED && !ON_CHIP && gather.at_once) {
      const Item q = item(a, i + 1, steps, first, true);
      gather.see(0, there(q), from(q));
    }
#endif
    if (NR) weights.product(mine, h, sums);
    if (NR || SCALED) __syncthreads();
    share_sums(sums, shares, rank, i);
#pragma unroll
    for (int e = 0; e < EPT; e++) {
      const Entry q = entry(a, m, e, part, end, steps);
      if (q.act) {
        real rbar[NR + 1], back[S];
#pragma unroll
        for (int j = 0; j < NR; j++) rbar[j] = total(sums, shares, i, q.r, j * U + q.ul);
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
