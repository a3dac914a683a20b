/* Loops over time, for one cell and one type of number.

   Put before this file: vectors.h, product.h, the counts SLOTS GATES READS KEPT SIDE, READ_SLOT (-1 where the read is a formula),
   INTO_READ (does f_x' lam enter the slot that is read) and NEEDS_A. Put after it: the elementwise loops declared below.

   Letters: T steps, B samples, d units. A row of a step array holds the gates of one sample at one step side by side,
   a row of a state array its slots. Step t takes x_t to x_{t+1}; samples are sorted by falling length. */

/* ---- the elementwise loops, over m rows ---- */

static void next(long m, long d, const real *a, const real *v, const real *x, const real *p, real *y, real *q);
static void pull(long m, long d, const real *y, const real *q, const real *a, const real *v, const real *x,
                 const real *p, const real *lam, const real *sa, real *delta, real *into);
static void push(long m, long d, const real *y, const real *q, const real *a, const real *v, const real *x,
                 const real *p, const real *mu, const real *nu, const real *g, real *out);
static void read(long m, long d, const real *x, real *r);
static void read_pull(long m, long d, const real *x, const real *rbar, const real *held, real *into);
static void read_push(long m, long d, const real *x, const real *mu, real *r);

/* ---- sweeps ---- */

struct sweep {
    int64_t T, B, d, threads, scaled, keep;
    int64_t W_step; /* values from the W of one step to that of the next; 0 where all share one */
    int64_t shared; /* does base have one row for each step, which all samples share? */
    int64_t width;  /* of the inputs u, if the forward loop computes base = R u + b */
    const int64_t *starts; /* [T + 1], of the steps in step arrays; 0 where each has B rows */
    const real *p, *W, *v;
    real *a, *x, *q;
    const real *step_source, *source; /* base, sa or ga; s or g */
    const real *last;                 /* [B, .] */
    const int32_t *k_last;            /* [B] */
    const real *link;                 /* [N] */
    real *state, *step;               /* lam or mu; delta or nu */
    int32_t *k;                       /* [B + N] */
    const real *costates, *rates;     /* [B + N, .] and [B + N], of dense.h */
    const real *u, *R, *b;            /* [N, width], [g d, width] and [g d] or 0 */
};

INLINE long start(const struct sweep *s, long t) { return s->starts ? s->starts[t] : t * s->B; }
INLINE long state_row(const struct sweep *s, long t) { return t ? s->B + start(s, t - 1) : 0; }
/* how many of the samples lo..hi take step t */
INLINE long taking(const struct sweep *s, long t, long lo, long hi) {
    long n = start(s, t + 1) - start(s, t);
    return (n < hi ? n : hi) - lo > 0 ? (n < hi ? n : hi) - lo : 0;
}

/* what a share is given: the sweep, and room for W as panels */
struct job {
    struct sweep sweep;
    real *panels, *input_panels; /* the latter of R */
    long K, N;
    int transposed;
};
/* W of step t as panels: packed here if it is another at every step */
INLINE const real *packed(const struct job *y, long t) {
    const struct sweep *s = &y->sweep;
    if (s->W_step) pack_weights(y->panels, s->W + t * s->W_step, y->K, y->N, y->transposed);
    return y->panels;
}
#define AT(array, row, width) ((array) ? (array) + (row) * (width) * d : 0)

static void forward_share(const void *given, long lo, long hi, real *scratch) {
    const struct job *job = given;
    const struct sweep *s = &job->sweep;
    long d = s->d, n;
    real *buffer = scratch, *r = scratch + (hi - lo) * GATES * d;
    for (long t = 0; t < s->T && (n = taking(s, t, lo, hi)); t++) {
        long row = start(s, t) + lo;
        const real *P = packed(job, t);
        const real *base = AT(s->step_source, s->shared ? t : row, GATES), *a = base;
        const real *x = s->x + (state_row(s, t) + lo) * SLOTS * d;
        if (s->u) {
            a = NEEDS_A ? s->a + row * GATES * d : buffer;
            product(n, GATES * d, s->width, s->u + row * s->width, s->width, job->input_panels, s->b, 0, (real *)a, GATES * d);
            base = a;
        }
        if (s->W) {
            real *sum = NEEDS_A ? s->a + row * GATES * d : buffer;
            const real *reading = x + (READ_SLOT < 0 ? 0 : READ_SLOT) * d;
            if (READ_SLOT < 0) read(n, d, x, r), reading = r;
            product(n, GATES * d, READS * d, reading, (READ_SLOT < 0 ? READS : SLOTS) * d, P, base,
                    s->shared ? 0 : GATES * d, sum, GATES * d);
            a = sum;
        }
        next(n, d, a, AT(s->v, row, SIDE), x, s->p, s->x + (state_row(s, t + 1) + lo) * SLOTS * d, AT(s->q, row, KEPT));
    }
}

enum { NONE = -(1 << 28) };
INLINE int exponent(const real *y, long n) {
    vec top = all(0);
    for (long j = 0; j < n; j += L) {
        vec y_j = magnitude(n - j >= L ? get(y + j, L) : get(y + j, n - j));
        top = pick(y_j > top, y_j, top);
    }
    bits most = largest((ivec)top); /* magnitudes are ordered as their bits are */
    return most >> DIGITS ? (int)(most >> DIGITS) - (BIAS - 1) : NONE;
}

/* y = y 2^k + z 2^h; a power is taken in two factors, as it may leave the range when the product does not */
INLINE void scaled_sum(long n, real *y, long k, const real *z, long h) {
    long half = k >> 1, other = h >> 1;
    real k1 = power_of_two(half), k2 = power_of_two(k - half), h1 = power_of_two(other), h2 = power_of_two(h - other);
    if (z) EACH(n, j, l, put(y + j, get(y + j, l) * k1 * k2 + get(z + j, l) * h1 * h2, l))
    else EACH(n, j, l, put(y + j, get(y + j, l) * k1 * k2, l))
}

INLINE void add_to(long n, real *y, const real *z) { EACH(n, j, l, put(y + j, get(y + j, l) + get(z + j, l), l)) }
INLINE void times(long n, real *out, const real *y, real factor) { EACH(n, j, l, put(out + j, get(y + j, l) * factor, l)) }

/* Finish y = lam_t of one sample, in the state row `row`. y 2^before is what later steps give; the source is added. In
   a scaled sweep the exponent of the larger of the two is chosen; a row of zeros keeps the exponent it had. */
INLINE void add_source(const struct sweep *s, long row, real *y, int before) {
    long n = SLOTS * s->d;
    const real *source = s->source ? s->source + row * n : 0;
    if (!s->scaled) {
        if (source) add_to(n, y, source);
        return;
    }
    int e = exponent(y, n), of_source = source ? exponent(source, n) : NONE, k = e == NONE ? NONE : before + e;
    k = of_source > k ? of_source : k;
    k = k == NONE ? before : k;
    s->k[row] = k;
    if (k != before || source) scaled_sum(n, y, (long)before - k, source, -(long)k);
}

static void adjoint_share(const void *given, long lo, long hi, real *scratch) {
    const struct job *job = given;
    const struct sweep *s = &job->sweep;
    long d = s->d, size = SLOTS * d;
    for (long t = s->T; t >= 0; t--) {
        long n = t < s->T ? taking(s, t, lo, hi) : 0, here = state_row(s, t) + lo;
        real *lam = s->state + (s->keep ? here : t % 2 * s->B + lo) * size;
        if (n) {
            const real *later = s->state + ((s->keep ? state_row(s, t + 1) : (t + 1) % 2 * s->B) + lo) * size;
            long row = start(s, t) + lo;
            const real *P = packed(job, t), *x = s->x + (state_row(s, t) + lo) * size;
            real *delta = s->step + row * GATES * d;
            pull(n, d, s->x + (state_row(s, t + 1) + lo) * size, AT(s->q, row, KEPT), AT(s->a, row, GATES),
                 AT(s->v, row, SIDE), x, s->p, later, AT(s->step_source, row, GATES), delta, lam);
            if (s->W && READ_SLOT >= 0) {
                real *into = lam + READ_SLOT * d;
                product(n, READS * d, GATES * d, delta, GATES * d, P, INTO_READ ? into : 0, size, into, size);
            } else if (s->W) {
                product(n, READS * d, GATES * d, delta, GATES * d, P, 0, 0, scratch, READS * d);
                read_pull(n, d, x, scratch, lam, lam);
            }
            for (long i = 0; i < n && (s->link || s->scaled || s->source); i++) {
                real *y = lam + i * size;
                if (s->link && s->link[row + i] != 1) times(size, y, y, s->link[row + i]);
                add_source(s, here + i, y, s->scaled ? s->k[state_row(s, t + 1) + lo + i] : 0);
            }
        }
        for (long i = n; i < (t ? taking(s, t - 1, lo, hi) : hi - lo); i++) { /* samples whose last state is x_t */
            if (s->last) memcpy(lam + i * size, s->last + (lo + i) * size, sizeof(real) * size);
            else memset(lam + i * size, 0, sizeof(real) * size);
            add_source(s, here + i, lam + i * size, s->k_last ? s->k_last[lo + i] : 0);
        }
    }
}

static void tangent_share(const void *given, long lo, long hi, real *scratch) {
    const struct job *job = given;
    const struct sweep *s = &job->sweep;
    long d = s->d, size = SLOTS * d, n;
    real *held = scratch, *r = scratch + (hi - lo) * size, *mu = s->state + lo * size;
    if (s->source) memcpy(mu, s->source + lo * size, sizeof(real) * (hi - lo) * size);
    else memset(mu, 0, sizeof(real) * (hi - lo) * size);
    for (long t = 0; t < s->T && (n = taking(s, t, lo, hi)); t++) {
        long row = start(s, t) + lo, after = state_row(s, t + 1) + lo;
        const real *P = packed(job, t), *x = s->x + (state_row(s, t) + lo) * size, *m = mu;
        real *nu = s->step + row * GATES * d;
        const real *ga = AT(s->step_source, row, GATES);
        if (s->link) {
            for (long i = 0; i < n; i++) times(size, held + i * size, mu + i * size, s->link[row + i]);
            m = held;
        }
        if (s->W) {
            const real *reading = m + (READ_SLOT < 0 ? 0 : READ_SLOT) * d;
            if (READ_SLOT < 0) read_push(n, d, x, m, r), reading = r;
            product(n, GATES * d, READS * d, reading, (READ_SLOT < 0 ? READS : SLOTS) * d, P, ga, GATES * d, nu,
                    GATES * d);
        } else if (ga)
            memcpy(nu, ga, sizeof(real) * n * GATES * d);
        else
            memset(nu, 0, sizeof(real) * n * GATES * d);
        mu = s->state + after * size;
        push(n, d, s->x + after * size, AT(s->q, row, KEPT), AT(s->a, row, GATES), AT(s->v, row, SIDE), x, s->p, m, nu,
             AT(s->source, after, SLOTS), mu);
    }
}

/* Run a loop; return 1 if there is no memory, else 0. Each thread takes some of the samples through all steps, about as
   many rows as the others. */
static int run_sweep(struct sweep *s, void (*run)(const void *, long, long, real *), int transposed) {
    long d = s->d, K = transposed ? READS * d : GATES * d, N = transposed ? GATES * d : READS * d;
    size_t width = (SLOTS + GATES + READS) * d, size = s->W ? vectors(N) * L * K : 0;
    size_t weights = size * (s->W_step ? s->threads : 1); /* a panel for each share, or one for all */
    size_t input_weights = s->u ? vectors(GATES * d) * L * s->width : 0;
    char *memory = malloc(sizeof(real) * (weights + input_weights + s->B * width) + 64);
    if (!memory) return 1;
    real *P = (real *)(memory + 64 - (uintptr_t)memory % 64), *P_u = P + weights, *scratch = P_u + input_weights;
    if (s->u) pack_weights(P_u, s->R, s->width, GATES * d, 1);
    if (size && !s->W_step) pack_weights(P, s->W, K, N, transposed);
    struct share shares[MOST_THREADS];
    struct job jobs[MOST_THREADS];
    long lo = 0, done = 0, count = 0, length = s->T;
    for (long i = 0; i < s->B; i++) {
        while (length && start(s, length) - start(s, length - 1) <= i) length--; /* of sample i */
        done += length;
        int enough = count < s->threads - 1 && (i + 1) % 4 == 0 && done * s->threads >= start(s, s->T) * (count + 1);
        if (enough || i + 1 == s->B) {
            jobs[count] = (struct job){*s, s->W_step ? P + count * size : P, P_u, K, N, transposed};
            shares[count] = (struct share){run, &jobs[count], lo, i + 1, scratch + lo * width};
            count++;
            lo = i + 1;
        }
    }
    run_shares(shares, count);
    free(memory);
    return 0;
}

int forward(struct sweep *s) { return run_sweep(s, forward_share, 1); }
int adjoint(struct sweep *s) { return run_sweep(s, adjoint_share, 0); }
int tangent(struct sweep *s) { return run_sweep(s, tangent_share, 1); }
