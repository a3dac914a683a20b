/* Products of a few rows with a matrix that is packed once.

   Put before this file: vectors.h. */

/* C[i, :n] = start[i, :n] + A[i, :] P for m rows; P is a panel of K rows of w vectors */
INLINE void tile(const int m, const int w, long n, long K, const real *A, long lda, const real *P, const real *start,
                 long lds, real *C, long ldc) {
    vec c[ROWS][WIDE];
    const long last = (w - 1) * L, left = n - last; /* only the last vector may be partial */
    UNROLLED for (int i = 0; i < m; i++) {
        UNROLLED for (int j = 0; j < w - 1; j++) c[i][j] = start ? get(start + i * lds + j * L, L) : all(0);
        c[i][w - 1] = start ? get(start + i * lds + last, left) : all(0);
    }
    for (long k = 0; k < K; k++, P += w * L)
        UNROLLED for (int i = 0; i < m; i++)
            UNROLLED for (int j = 0; j < w; j++) c[i][j] = fma_(all(A[i * lda + k]), *(const vec *)(P + j * L), c[i][j]);
    UNROLLED for (int i = 0; i < m; i++) {
        UNROLLED for (int j = 0; j < w - 1; j++) put(C + i * ldc + j * L, c[i][j], L);
        put(C + i * ldc + last, c[i][w - 1], left);
    }
}

#define TILE(m, w) \
    static void tile_##m##_##w(long n, long K, const real *A, long lda, const real *P, const real *start, long lds, \
                               real *C, long ldc) { \
        tile(m, w, n, K, A, lda, P, start, lds, C, ldc); \
    }
#define TILES(m) TILE(m, 1) TILE(m, 2) TILE(m, 3)
TILES(1)
TILES(2)
TILES(4)
#if defined(__AVX512F__) || defined(__aarch64__)
TILES(8)
#else
#define tile_8_1 0
#define tile_8_2 0
#define tile_8_3 0
#endif
typedef void (*tiled)(long, long, const real *, long, const real *, const real *, long, real *, long);
static const tiled TABLE[4][WIDE] = {{tile_1_1, tile_1_2, tile_1_3},
                                     {tile_2_1, tile_2_2, tile_2_3},
                                     {tile_4_1, tile_4_2, tile_4_3},
                                     {tile_8_1, tile_8_2, tile_8_3}};

/* P <- M [K, N], or the transpose of M [N, K], as panels padded with zeros */
static void pack_weights(real *P, const real *M, long K, long N, int transposed) {
    for (long i = 0; i < panels(N); i++) {
        long from = edge(N, i) * L, to = edge(N, i + 1) * L, end = to < N ? to : N, w = to - from;
        if (end < to) memset(P, 0, sizeof(real) * w * K);
        if (transposed) {
            long j = from;
            for (; j + 8 <= end; j += 8) /* eight rows of M at once, as eight numbers side by side */
                for (long k = 0; k < K; k++) {
                    real eight[8];
                    UNROLLED for (int i = 0; i < 8; i++) eight[i] = M[(j + i) * K + k];
                    memcpy(P + k * w + j - from, eight, sizeof eight);
                }
            for (; j < end; j++)
                for (long k = 0; k < K; k++) P[k * w + j - from] = M[j * K + k];
        } else
            for (long k = 0; k < K; k++) memcpy(P + k * w, M + k * N + from, sizeof(real) * (end - from));
        P += w * K;
    }
}

/* C [m, N] = start + A [m, K] M with M packed as P; start may be C, or 0 for nothing */
static void product(long m, long N, long K, const real *A, long lda, const real *P, const real *start, long lds, real *C,
                    long ldc) {
    for (long p = 0; p < panels(N); p++) {
        long from = edge(N, p) * L, w = edge(N, p + 1) - edge(N, p), n = w * L < N - from ? w * L : N - from;
        long i = 0;
        for (int size = ROWS, level = ROWS == 8 ? 3 : 2; size; size /= 2, level--)
            for (; i + size <= m; i += size)
                TABLE[level][w - 1](n, K, A + i * lda, lda, P, start ? start + i * lds + from : 0, lds,
                                    C + i * ldc + from, ldc);
        P += w * L * K;
    }
}
