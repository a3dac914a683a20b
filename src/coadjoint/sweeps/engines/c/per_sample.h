/* What the gradient of a chain computes once for each sample: its cross-entropy, and the log-ratios of its costates.

   Put before this file: vectors.h. */

/* Of rows a [n, c] and classes y [n]: value = -log p_y with p = softmax(a), slope = p - e_y, and p.

   The greatest p is 1 less the sum of the others, and its slope is minus the sum of theirs: no digits are lost where it
   is near 1. */
void cross_entropy(int64_t n, int64_t c, const real *a, const int64_t *y, real *value, real *slope, real *p) {
    for (long i = 0; i < n; i++, a += c, slope += c, p += c) {
        long top = 0;
        for (long j = 1; j < c; j++) top = a[j] > a[top] ? j : top;
        double others = 0, rest = 0;
        for (long j = 0; j < c; j++) {
            p[j] = j == top ? 1 : LIBM(exp)(a[j] - a[top]);
            others += j == top ? 0 : p[j];
        }
        for (long j = 0; j < c; j++) {
            p[j] = p[j] / (1 + others);
            slope[j] = j == y[i] ? p[j] - 1 : p[j];
            rest += j == top ? 0 : slope[j];
        }
        slope[top] = -rest;
        value[i] = __builtin_log1p(others) - (y[i] == top ? 0 : (double)a[y[i]] - a[top]);
    }
}

/* bend = p (v - <p, v>) of rows [n, c], the change of the slope along v; less a number, v is 0 where p is greatest */
void cross_entropy_bend(int64_t n, int64_t c, const real *p, const real *v, real *bend) {
    for (long i = 0; i < n; i++, p += c, v += c, bend += c) {
        long top = 0;
        for (long j = 1; j < c; j++) top = p[j] > p[top] ? j : top;
        double mean = 0;
        for (long j = 0; j < c; j++) mean += (double)p[j] * (v[j] - v[top]);
        for (long j = 0; j < c; j++) bend[j] = p[j] * ((v[j] - v[top]) - mean);
    }
}

/* r_i = log size_i - log size_{i+1} + (k_i - k_{i+1}) log 2, i = first..T-1, of size and k [T + 1, B]: value = mean of
   r_i^2, and its slope 2 (r_i - r_{i-1}) / count by log size_i [T + 1, B]; there is no r before and none after them */
void log_ratios(int64_t T, int64_t B, int64_t first, const real *size, const int32_t *k, real *value, double *slope) {
    const double ln2 = 0.693147180559945309417232;
    double count = T - first > 1 ? T - first : 1;
    for (long i = 0; i < (T + 1) * B; i++) slope[i] = __builtin_log(size[i]);
    for (long j = 0; j < B; j++) {
        double sum = 0, before = 0;
        for (long i = 0; i <= T; i++) {
            long here = i * B + j, next = here + B;
            double r = 0;
            if (i >= first && i < T) r = slope[here] - slope[next] + ln2 * ((double)k[here] - k[next]);
            slope[here] = (r - before) * (2 / count);
            before = r;
            sum += r * r;
        }
        value[j] = sum / count;
    }
}
