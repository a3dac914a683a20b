/* Sums over rows of y_i r_i', where r_i are columns of several arrays side by side: the gradients by weights.

   Put before this file: vectors.h.

   The rows come in parts, which are added one after the other; a part is cut into blocks from its first row on. A block
   is summed in `real`, SUBBLOCK rows at a time, and added to sums in double: float32 loses digits over many rows. Every
   entry is computed by one thread, in an order that depends on the parts alone: not on the number of threads, and not on
   what else is summed beside it. */

#ifdef MASKED
enum { HAS_MASKS = 1 };
#else
enum { HAS_MASKS = 0 };
#endif
enum { BLOCK = 1024, SUBBLOCK = 256, MOST_SOURCES = 4 };
typedef double doubles __attribute__((vector_size(8 * L)));
typedef double loose_doubles __attribute__((vector_size(8 * L), aligned(8), may_alias));

/* one of the arrays side by side; r is 0 for a column of ones */
struct source {
    const real *r;
    int64_t step, columns; /* values from one row to the next */
};
struct products {
    int64_t m, width, threads, parts; /* columns of y, and of all sources */
    const int64_t *bounds;            /* [parts, 2]: the first row of each part, and the row after its last */
    const real *y;
    int64_t y_step;
    double *sums; /* [width, m], added to */
    struct source sources[MOST_SOURCES];
    real *outs[MOST_SOURCES]; /* for join_products: [m, columns] of each source */
};

/* sums[i, :n] += sum over k of A[k, i] P[k, :n] for m columns of A; A [K, m] is packed, and so is P [K, w L] unless
   `step` tells how far apart its rows are */
INLINE void outer_sums(const int m, const int w, const int packed, long n, long K, const real *A, const real *P, long step,
                       double *sums, long lds) {
    vec total[ROWS][WIDE];
    const long last = (w - 1) * L, left = n - last; /* only the last vector may be partial */
    for (long from = 0; from < K; from += SUBBLOCK) {
        vec c[ROWS][WIDE], x[WIDE];
        long count = K - from < SUBBLOCK ? K - from : SUBBLOCK;
        UNROLLED for (int i = 0; i < m; i++)
            UNROLLED for (int j = 0; j < w; j++) c[i][j] = all(0);
        for (long k = 0; k < count; k++, A += m, P += packed ? w * L : step) {
            UNROLLED for (int j = 0; j < w - 1; j++) x[j] = packed ? *(const vec *)(P + j * L) : get(P + j * L, L);
            x[w - 1] = packed ? *(const vec *)(P + last) : left == L ? get(P + last, L) : get(P + last, left);
            UNROLLED for (int i = 0; i < m; i++)
                UNROLLED for (int j = 0; j < w; j++) c[i][j] = fma_(all(A[i]), x[j], c[i][j]);
        }
        UNROLLED for (int i = 0; i < m; i++)
            UNROLLED for (int j = 0; j < w; j++) total[i][j] = from ? total[i][j] + c[i][j] : c[i][j];
    }
    for (int i = 0; i < m; i++, sums += lds) {
        for (int j = 0; j < w - 1; j++)
            *(loose_doubles *)(sums + j * L) += __builtin_convertvector(total[i][j], doubles);
        if (left == L) *(loose_doubles *)(sums + last) += __builtin_convertvector(total[i][w - 1], doubles);
        else for (long l = 0; l < left; l++) sums[last + l] += total[i][w - 1][l];
    }
}

#define OUTER_SUMS(m, w) \
    static void outer_sums_##m##_##w(long n, long K, const real *A, const real *P, long step, double *sums, long lds) { \
        if (step) outer_sums(m, w, 0, n, K, A, P, step, sums, lds); \
        else outer_sums(m, w, 1, n, K, A, P, 0, sums, lds); \
    }
#define WIDTHS(m) OUTER_SUMS(m, 1) OUTER_SUMS(m, 2) OUTER_SUMS(m, 3)
#define NAMES(m) {outer_sums_##m##_1, outer_sums_##m##_2, outer_sums_##m##_3}
typedef void (*adds_outer)(long, long, const real *, const real *, long, double *, long);
WIDTHS(1) WIDTHS(2) WIDTHS(3) WIDTHS(4)
#if defined(__AVX512F__) || defined(__aarch64__)
WIDTHS(5) WIDTHS(6) WIDTHS(7) WIDTHS(8)
static const adds_outer OUTER[ROWS][WIDE] = {NAMES(1), NAMES(2), NAMES(3), NAMES(4), NAMES(5), NAMES(6), NAMES(7), NAMES(8)};
#else
static const adds_outer OUTER[ROWS][WIDE] = {NAMES(1), NAMES(2), NAMES(3), NAMES(4)};
#endif

/* A [K, m] <- one column of a packed block; r is 0 for ones */
static void pack_column(real *A, long m, const real *r, long step, long K) {
    for (long k = 0; k < K; k++, A += m) *A = r ? r[k * step] : 1;
}
INLINE void copy_rows(const int m, real *A, const real *r, long step, long K) {
    for (long k = 0; k < K; k++, r += step, A += m) memcpy(A, r, sizeof(real) * m);
}
#define COPY(m) case m: copy_rows(m, A, r, step, K); break;
/* A [K, m] <- m columns that lie side by side in r */
static void pack_columns(real *A, long m, const real *r, long step, long K) {
    switch (m) { COPY(1) COPY(2) COPY(3) COPY(4) COPY(5) COPY(6) COPY(7) COPY(8) }
}

/* A <- the columns lo .. hi of the sources, in `count` groups whose columns lie side by side, each group [K, columns] */
static void pack_sources(const struct products *s, real *A, long lo, long hi, long count, long row, long K) {
    for (long g = 0; g < count; g++) {
        long from = lo + (hi - lo) * g / count, to = lo + (hi - lo) * (g + 1) / count, m = to - from, begin = 0;
        for (const struct source *y = s->sources; begin < to; begin += y->columns, y++) {
            long first = from > begin ? from : begin, end = begin + y->columns < to ? begin + y->columns : to;
            const real *r = y->r ? y->r + row * y->step + first - begin : 0;
            if (r && end - first == m) pack_columns(A, m, r, y->step, K);
            else
                for (long i = first; i < end; i++, r += !!r) pack_column(A + i - from, m, r, y->step, K);
        }
        A += m * K;
    }
}

/* P [K, w L] <- n columns of rows y, padded with zeros */
static void pack_panel(real *P, const real *y, long step, long K, long n, long w) {
    long last = (w - 1) * L;
    for (long k = 0; k < K; k++, y += step, P += w * L) {
        for (long j = 0; j < last; j += L) put(P + j, get(y + j, L), L);
        put(P + last, get(y + last, n - last), L);
    }
}

/* The vectors lo .. hi of the sums over rows of y, as outer_sums takes them with a column of ones */
enum { ABREAST = 8 }; /* vectors that are summed at once */
static void row_sums_share(const void *given, long lo, long hi, real *scratch) {
    const struct products *s = given;
    for (long part = 0; part < s->parts; part++)
        for (long row = s->bounds[2 * part], end = s->bounds[2 * part + 1]; row < end; row += BLOCK)
            for (long v = lo; v < hi; v += ABREAST) {
                long from = v * L, w = hi - v < ABREAST ? hi - v : ABREAST;
                long n = s->m - from < w * L ? s->m - from : w * L, last = n - (w - 1) * L;
                long K = end - row < BLOCK ? end - row : BLOCK;
                const real *y = s->y + row * s->y_step + from;
                vec total[ABREAST];
                for (long k = 0; k < K;) {
                    vec c[ABREAST];
                    long stop = K - k < SUBBLOCK ? K : k + SUBBLOCK, begin = k;
                    for (long j = 0; j < ABREAST; j++) c[j] = all(0);
                    if (w == ABREAST && last == L)
                        for (; k < stop; k++, y += s->y_step)
                            UNROLLED for (long j = 0; j < ABREAST; j++) c[j] = get(y + j * L, L) + c[j];
                    else
                        for (; k < stop; k++, y += s->y_step) {
                            for (long j = 0; j < w - 1; j++) c[j] = get(y + j * L, L) + c[j];
                            c[w - 1] = get(y + (w - 1) * L, last) + c[w - 1];
                        }
                    for (long j = 0; j < w; j++) total[j] = begin ? total[j] + c[j] : c[j];
                }
                for (long i = 0; i < n; i++) s->sums[from + i] += total[i / L][i % L];
            }
}

/* The columns lo .. hi of the sources, with all of y; scratch: their columns, and a panel of y, of one block */
static void products_share(const void *given, long lo, long hi, real *scratch) {
    const struct products *s = given;
    long count = (hi - lo + ROWS - 1) / ROWS;
    real *P = scratch, *packed_columns = scratch + BLOCK * WIDE * L;
    for (long part = 0; part < s->parts; part++)
        for (long row = s->bounds[2 * part], end = s->bounds[2 * part + 1]; row < end; row += BLOCK) {
            long K = end - row < BLOCK ? end - row : BLOCK;
            pack_sources(s, packed_columns, lo, hi, count, row, K);
            for (long p = 0; p < panels(s->m); p++) {
                long from = edge(s->m, p) * L, w = edge(s->m, p + 1) - edge(s->m, p);
                long n = w * L < s->m - from ? w * L : s->m - from;
                const real *y = s->y + row * s->y_step + from, *A = packed_columns;
                /* A panel is packed to be read often. Rows that are all the same one have no step to tell it by. */
                int packs = count > 2 || (n < w * L && !HAS_MASKS) || !s->y_step;
                if (packs) pack_panel(P, y, s->y_step, K, n, w);
                for (long g = 0; g < count; g++) {
                    long i = lo + (hi - lo) * g / count, m = lo + (hi - lo) * (g + 1) / count - i;
                    OUTER[m - 1][w - 1](n, K, A, packs ? P : y, packs ? 0 : s->y_step, s->sums + i * s->m + from, s->m);
                    A += m * K;
                }
            }
        }
}

/* sums += sum over rows of r_i y_i'; return 1 if there is no memory, else 0. Each thread takes some columns of r, or of y
   where r is a column of ones alone. */
int add_products(struct products *s) {
    struct share shares[MOST_THREADS];
    int only_ones = s->width == 1 && !s->sources[0].r;
    long most = only_ones ? vectors(s->m) : s->width, threads = s->threads < most ? s->threads : most;
    size_t room = BLOCK * (WIDE * L + s->width / threads + 1);
    room = (room + L - 1) / L * L; /* whole vectors */
    char *memory = malloc(sizeof(real) * room * threads + 64);
    if (!memory) return 1;
    real *scratch = (real *)(memory + 64 - (uintptr_t)memory % 64);
    for (long i = 0; i < threads; i++) {
        long lo = most * i / threads, hi = most * (i + 1) / threads;
        shares[i] = (struct share){only_ones ? row_sums_share : products_share, s, lo, hi, scratch + i * room};
    }
    run_shares(shares, threads);
    free(memory);
    return 0;
}

/* outs <- the sums over rows of y_i r_i' for each source r, with the bits of add_products; return 1 if there is no memory */
int join_products(struct products *s) {
    s->sums = calloc(s->width * s->m, sizeof(double));
    int failed = !s->sums || add_products(s);
    const double *sums = s->sums;
    for (long k = 0, first = 0; first < s->width && !failed; first += s->sources[k++].columns)
        for (long j = 0, columns = s->sources[k].columns; j < s->m; j++)
            for (long i = 0; i < columns; i++) s->outs[k][j * columns + i] = sums[(first + i) * s->m + j];
    free(s->sums);
    return failed;
}
