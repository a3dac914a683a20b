/* The tangents of dense layers, for penalties of their costates. Put after loops.h, for a cell of one gate and one slot,
   which W reads: x_{t+1} = psi(a_t), a_t = W_t x_t + b_t. */

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
