/* What a gradient computes once for each sample: its cross-entropy, the norms of its costates, and their log-ratios.

   Put before this file: vectors.h. */

/* ---- cross-entropy ----

   Of rows a [n, c] and classes y [n]: value = -log p_y with p = softmax(a), slope = p - e_y, and p. Where p is greatest
   it is 1 less the sum of the others, and only those are added up: no digits are lost where it is near 1. */

enum { FEW = 16 }; /* with fewer classes a lane holds a row, otherwise a class */

INLINE real lane_sum(vec a) {
    real sum = 0;
    for (int l = 0; l < L; l++) sum += a[l];
    return sum;
}

/* m <= L rows of few classes */
INLINE void few_classes(long m, long c, const real *a, const int64_t *y, real *value, real *slope, real *p) {
    vec at[FEW], share[FEW], most, others = all(0), top = all(0), label = all(0), below = all(0);
    for (long j = 0; j < c; j++) {
        at[j] = all(0);
        for (long i = 0; i < m; i++) at[j][i] = a[i * c + j];
    }
    for (long i = 0; i < m; i++) label[i] = y[i];
    most = at[0];
    for (long j = 1; j < c; j++) {
        top = pick(at[j] > most, all(j), top);
        most = pick(at[j] > most, at[j], most);
    }
    for (long j = 0; j < c; j++) {
        vec off = at[j] - most;
        share[j] = pick(top == all(j), all(0), exp_(off));
        others += share[j];
        below = pick(label == all(j), pick(top == all(j), all(0), off), below);
    }
    vec whole = others + 1;
    for (long j = 0; j < c; j++) {
        vec here = pick(top == all(j), all(1), share[j]) / whole;
        vec less = pick(top == all(j), -(others / whole), here - 1);
        vec by = pick(label == all(j), less, here);
        for (long i = 0; i < m; i++) p[i * c + j] = here[i], slope[i * c + j] = by[i];
    }
    for (long i = 0; i < m; i++) value[i] = LIBM(log1p)(others[i]) - below[i];
}

/* one row of many classes */
INLINE void many_classes(long c, const real *a, int64_t y, real *value, real *slope, real *p) {
    long top = 0;
    for (long j = 1; j < c; j++) top = a[j] > a[top] ? j : top;
    vec sum = all(0), most = all(a[top]);
    EACH(c, j, l, put(p + j, exp_(get(a + j, l) - most), l))
    p[top] = 0;
    EACH(c, j, l, sum += get(p + j, l))
    real others = lane_sum(sum), whole = 1 + others;
    p[top] = 1;
    EACH(c, j, l, put(p + j, get(p + j, l) / whole, l))
    memcpy(slope, p, sizeof(real) * c);
    slope[y] = y == top ? -(others / whole) : p[y] - 1;
    *value = LIBM(log1p)(others) - (y == top ? 0 : a[y] - a[top]);
}

void cross_entropy(int64_t n, int64_t c, const real *a, const int64_t *y, real *value, real *slope, real *p) {
    long step = c < FEW ? L : 1;
    for (long i = 0; i < n; i += step) {
        long m = n - i < step ? n - i : step;
        if (c < FEW) few_classes(m, c, a + i * c, y + i, value + i, slope + i * c, p + i * c);
        else many_classes(c, a + i * c, y[i], value + i, slope + i * c, p + i * c);
    }
}

/* bend = p (v - <p, v>) of rows [n, c], the change of the slope along v; less a number, v is 0 where p is greatest */
void cross_entropy_bend(int64_t n, int64_t c, const real *p, const real *v, real *bend) {
    for (long i = 0; i < n; i++, p += c, v += c, bend += c) {
        long top = 0;
        for (long j = 1; j < c; j++) top = p[j] > p[top] ? j : top;
        vec sum = all(0), there = all(v[top]);
        EACH(c, j, l, sum += get(p + j, l) * (get(v + j, l) - there))
        vec mean = all(lane_sum(sum));
        EACH(c, j, l, put(bend + j, get(p + j, l) * (get(v + j, l) - there - mean), l))
    }
}

/* ---- costates ---- */

/* y 2^k, in two factors: 2^k may lie outside the range where y 2^k does not */
INLINE real times_two_to(real y, long k) { return y * power_of_two(k >> 1) * power_of_two(k - (k >> 1)); }

/* ||y 2^-k|| of d numbers; 0 or inf where the squares leave the range */
INLINE real norm_of_squares(long d, const real *y, long k) {
    vec squares = all(0), half = all(power_of_two(-k >> 1)), rest = all(power_of_two(-k - (-k >> 1)));
    EACH(d, j, l, { vec a = get(y + j, l) * half * rest; squares = fma_(a, a, squares); })
    return LIBM(sqrt)(lane_sum(squares));
}

/* out = ||y|| of rows [n, d], also where the squares leave the range of real */
void row_norms(int64_t n, int64_t d, const real *y, real *out) {
    for (long i = 0; i < n; i++, y += d) {
        out[i] = norm_of_squares(d, y, 0);
        if (out[i] > 0 && out[i] < inf) continue;
        real most = 0;
        for (long j = 0; j < d; j++) most = LIBM(fabs)(y[j]) > most ? LIBM(fabs)(y[j]) : most;
        if (!(most > 0 && most < inf)) continue; /* zero, inf or NaN as it is */
        int k;
        LIBM(frexp)(most, &k);
        out[i] = times_two_to(norm_of_squares(d, y, k), k);
    }
}

/* out = g / size * y of rows [n, d] with numbers size and g [n], the gradient g by the norms `size` of y; 0 where these
   are below the normal range. Where they are so small that g / size may leave the range, y is divided first. */
void norm_gradient(int64_t n, int64_t d, const real *y, const real *size, const real *g, real *out) {
    const real least = power_of_two(1 - BIAS), small = power_of_two(-BIAS / 2);
    for (long i = 0; i < n; i++, y += d, out += d) {
        real divisor = size[i] < small ? size[i] : 1, factor = size[i] < small ? g[i] : g[i] / size[i];
        if (size[i] < least) memset(out, 0, sizeof(real) * d);
        else if (divisor == 1) EACH(d, j, l, put(out + j, get(y + j, l) * factor, l))
        else EACH(d, j, l, put(out + j, get(y + j, l) / divisor * factor, l))
    }
}

/* out = y 2^k of rows [n, d] with numbers k [n] */
void scale_rows(int64_t n, int64_t d, const real *y, const int32_t *k, real *out) {
    for (long i = 0; i < n; i++, y += d, out += d) {
        real half = power_of_two(k[i] >> 1), rest = power_of_two(k[i] - (k[i] >> 1));
        EACH(d, j, l, put(out + j, get(y + j, l) * half * rest, l))
    }
}

/* r_i = log size_i - log size_{i+1} + (k_i - k_{i+1}) log 2, i = first..T-1, of size and k [T + 1, B]: value = mean of
   r_i^2, and its slope 2 (r_i - r_{i-1}) / (count size_i) by size_i [T + 1, B]; there is no r before and none after */
void log_ratios(int64_t T, int64_t B, int64_t first, const real *size, const int32_t *k, real *value, real *slope) {
    const double ln2 = 0.693147180559945309417232, count = T - first > 1 ? T - first : 1;
    for (long j = 0; j < B; j++) {
        double sum = 0, before = 0, here = __builtin_log(size[j]), next = 0;
        for (long i = 0, at = j; i <= T; i++, at += B, here = next) {
            if (i < T) next = __builtin_log(size[at + B]);
            double r = i >= first && i < T ? here - next + ln2 * ((double)k[at] - k[at + B]) : 0;
            slope[at] = (r - before) * (2 / count) / size[at];
            before = r;
            sum += r * r;
        }
        value[j] = sum / count;
    }
}
