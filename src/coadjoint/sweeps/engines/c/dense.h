/* What dense layers have of their own: tangents for penalties of their costates, and the gradients by W_t and b_t. Put
   after loops.h, for a cell of one gate and one slot, which W reads: x_{t+1} = psi(a_t), a_t = W_t x_t + b_t. */

/* ---- tangents ---- */

/* out = psi'(a) nu, and bend = psi''(a) nu lam unless that is zero everywhere */
static void push_and_bend(long m, long d, const real *y, const real *q, const real *a, const real *x, const real *mu,
                          const real *nu, const real *lam, real *out, real *bend);

/* mu += s_t + rate_t lam_t for n samples, whose state rows begin at `row` */
INLINE void add_penalty_slope(const struct sweep *s, long row, long n, real *mu) {
    long d = s->d;
    if (s->source) add_to(n * d, mu, s->source + row * d);
    for (long i = 0; i < n && s->rates; i++) {
        const real *lam = s->costates + (row + i) * d;
        real *y = mu + i * d, rate = s->rates[row + i];
        EACH(d, j, l, put(y + j, get(y + j, l) + get(lam + j, l) * rate, l))
    }
}

/* mu_0 = first + s_0 + rate_0 lam_0;  m_t = 2^(k_{t+1} - k_t) mu_t,  mu_{t+1} = psi'(a_t) W_t m_t + s_{t+1} + rate_{t+1}
   lam_{t+1};  and m_T = 2^-k_T mu_T. Arrays: last for `first`, state for m, step for the bend. */
static void dense_share(const void *given, long lo, long hi, real *scratch) {
    const struct job *job = given;
    const struct sweep *s = &job->sweep;
    long d = s->d, n = hi - lo;
    real *mu = scratch, *nu = scratch + n * d;
    if (s->last) memcpy(mu, s->last + lo * d, sizeof(real) * n * d);
    else memset(mu, 0, sizeof(real) * n * d);
    for (long t = 0; t <= s->T; t++) {
        long here = t * s->B + lo, after = here + s->B;
        real *m = s->state + here * d;
        add_penalty_slope(s, here, n, mu);
        for (long i = 0; i < n; i++) {
            long unit = t < s->T ? s->k[after + i] : 0;
            times(d, m + i * d, mu + i * d, power_of_two(unit - s->k[here + i]));
        }
        if (t == s->T) break;
        product(n, d, d, m, d, packed(job, t), 0, 0, nu, d);
        push_and_bend(n, d, s->x + after * d, AT(s->q, here, KEPT), AT(s->a, here, 1), s->x + here * d, m, nu,
                      s->costates + after * d, mu, AT(s->step, here, 1));
    }
}

int dense_tangent(struct sweep *s) { return run_sweep(s, dense_share, 1); }

/* ---- the gradients by the weights ---- */

struct layers {
    int64_t T, B, d, threads;
    const real *delta, *x;     /* [T B, d] */
    const real *lam_delta, *m; /* [T B, d], or 0: delta of the costates, and their tangents */
    real *by_W, *by_b;         /* [T, d, d] and [T, d] */
};

/* C[i, :n] = sum over k of A[k, i] X[k, :n] + D[k, i] M[k, :n], for m rows of w vectors and K samples; D may be 0 */
INLINE void outer(const int m, const int w, long n, long K, long d, const real *A, const real *X, const real *D,
                  const real *M, real *C) {
    vec c[ROWS][WIDE] = {0};
    const long last = (w - 1) * L, left = n - last; /* only the last vector may be partial */
    for (int pair = 0; pair < (D ? 2 : 1); pair++, A = D, X = M)
        for (long k = 0; k < K; k++) {
            vec x[WIDE];
            UNROLLED for (int j = 0; j < w - 1; j++) x[j] = get(X + k * d + j * L, L);
            x[w - 1] = left == L ? get(X + k * d + last, L) : get(X + k * d + last, left);
            UNROLLED for (int i = 0; i < m; i++)
                UNROLLED for (int j = 0; j < w; j++) c[i][j] = fma_(all(A[k * d + i]), x[j], c[i][j]);
        }
    UNROLLED for (int i = 0; i < m; i++) {
        UNROLLED for (int j = 0; j < w - 1; j++) put(C + i * d + j * L, c[i][j], L);
        put(C + i * d + last, c[i][w - 1], left);
    }
}
#define OUTER(m, w) case w: outer(m, w, n, B, d, A + i, X + from, D ? D + i : 0, D ? M + from : 0, C + i * d + from); break;
#define OUTERS(m) for (; i + m <= d; i += m) switch (w) { OUTER(m, 1) OUTER(m, 2) OUTER(m, 3) }

static void layers_share(const void *given, long lo, long hi, real *scratch) {
    const struct layers *s = given;
    long d = s->d, B = s->B;
    for (long t = lo; t < hi; t++) {
        const real *A = s->delta + t * B * d, *X = s->x + t * B * d;
        const real *D = s->lam_delta ? s->lam_delta + t * B * d : 0, *M = s->m + t * B * d;
        real *C = s->by_W + t * d * d, *sum = s->by_b + t * d;
        for (long p = 0; p < panels(d); p++) {
            long from = edge(d, p) * L, w = edge(d, p + 1) - edge(d, p), n = w * L < d - from ? w * L : d - from, i = 0;
#if defined(__AVX512F__) || defined(__aarch64__)
            OUTERS(8)
#endif
            OUTERS(4)
            OUTERS(1)
        }
        memcpy(sum, A, sizeof(real) * d);
        for (long k = 1; k < B; k++) add_to(d, sum, A + k * d);
    }
}

void layer_gradients(struct layers *s) {
    struct share shares[MOST_THREADS];
    for (long i = 0; i < s->threads; i++)
        shares[i] = (struct share){layers_share, s, s->T * i / s->threads, s->T * (i + 1) / s->threads, 0};
    run_shares(shares, s->threads);
}
