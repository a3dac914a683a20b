/* Vectors of numbers, the functions a formula may use on them, and threads.

   Put before this file: REAL_IS_DOUBLE.

   Every element goes through the same operations in the same order, wherever it lies in a vector, a tile or a
   thread's share: results do not depend on how the batch is divided. */

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define JOINED_(a, b, c) a##b##c
#define JOINED(a, b, c) JOINED_(a, b, c)
#if defined(__AVX512F__)
enum { BYTES = 64, ROWS = 8 };
#define MASKED(f) JOINED(__builtin_ia32_##f##up, KIND, 512_mask)
#elif defined(__AVX__)
enum { BYTES = 32, ROWS = 4 };
#elif defined(__aarch64__)
enum { BYTES = 16, ROWS = 8 };
#else
enum { BYTES = 16, ROWS = 4 };
#endif
enum { WIDE = 3 }; /* a tile of the product is ROWS rows of WIDE vectors: as many as fit the registers */

#if REAL_IS_DOUBLE
typedef double real;
typedef int64_t bits;
#define LIBM(name) __builtin_##name
#define KIND d
#define LANE_NAME "2d"
enum { DIGITS = 52, BIAS = 1023 };
#else
typedef float real;
typedef int32_t bits;
#define LIBM(name) __builtin_##name##f
#define KIND s
#define LANE_NAME "4s"
enum { DIGITS = 23, BIAS = 127 };
#endif
enum { L = BYTES / sizeof(real) };
typedef real vec __attribute__((vector_size(BYTES)));
typedef real loose __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));
typedef bits ivec __attribute__((vector_size(BYTES)));
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif
#define inf ((real)__builtin_inf())
#define nan ((real)__builtin_nan(""))

/* n <= L numbers from memory, the other lanes zero; n is a constant wherever it is L */
INLINE vec get(const real *y, long n) {
    if (n == L) return *(const loose *)y;
#ifdef MASKED
    return MASKED(load)((void *)y, (vec){0}, (1u << n) - 1);
#else
    vec r = {0};
    for (long l = 0; l < n; l++) r[l] = y[l];
    return r;
#endif
}

INLINE void put(real *y, vec r, long n) {
    if (n == L) {
        *(loose *)y = r;
        return;
    }
#ifdef MASKED
    MASKED(store)((void *)y, r, (1u << n) - 1);
#else
    for (long l = 0; l < n; l++) y[l] = r[l];
#endif
}

/* 2^k, 0 below the normal range, the largest power above it */
INLINE real power_of_two(long k) {
    bits b = (bits)((k < -BIAS ? -BIAS : k > BIAS ? BIAS : k) + BIAS) << DIGITS;
    real r;
    memcpy(&r, &b, sizeof r);
    return r;
}

/* ---- functions of a vector; comparisons are written so that NaN stays NaN ---- */

/* run `does` for the numbers j .. j + l of a row of n: whole vectors, then the rest */
#define EACH(n, j, l, does) \
    { \
        long j = 0; \
        for (; j + L <= n; j += L) { enum { l = L }; does; } \
        if (j < n) { const long l = n - j; does; } \
    }

/* c in every lane. Not 0 + c: compilers must keep that sum, since it turns -0 into 0, and the copies of a number in
   memory then take instructions that Intel's processors run in place of multiply-adds. */
INLINE vec all(real c) { return c - (vec){0}; }
INLINE vec pick(ivec yes, vec a, vec b) { return (vec)(((ivec)a & yes) | ((ivec)b & ~yes)); }
INLINE vec magnitude(vec a) { return (vec)((ivec)a & ~((ivec){0} + ((bits)1 << (8 * sizeof(real) - 1)))); }
/* a b + c, rounded once. Every compiler is told the instruction: gcc 13 leaves a loop over the lanes in 16 pieces, which
   is ten times as slow. */
#ifndef __has_builtin
#define __has_builtin(name) 0
#endif
INLINE vec fma_(vec a, vec b, vec c) {
#if !defined(__FMA__) && !defined(__aarch64__)
    return a * b + c;
#elif __has_builtin(__builtin_elementwise_fma)
    return __builtin_elementwise_fma(a, b, c);
#elif defined(__AVX512F__)
    return JOINED(__builtin_ia32_vfmaddp, KIND, 512_mask)(a, b, c, -1, 4); /* -1: all lanes, 4: the current rounding */
#elif defined(__FMA__)
    return JOINED(__builtin_ia32_vfmaddp, KIND, 256)(a, b, c);
#else
    __asm__("fmla %0." LANE_NAME ", %1." LANE_NAME ", %2." LANE_NAME : "+w"(c) : "w"(a), "w"(b));
    return c;
#endif
}
#define LANES(name, f) \
    INLINE vec name(vec a) { \
        vec r; \
        for (int l = 0; l < L; l++) r[l] = LIBM(f)(a[l]); \
        return r; \
    }
LANES(sqrt_, sqrt)
LANES(sin_, sin)
LANES(cos_, cos)
LANES(erf_, erf)
LANES(atan_, atan)
INLINE vec power_(vec a, real n) {
    vec r;
    for (int l = 0; l < L; l++) r[l] = LIBM(pow)(a[l], n);
    return r;
}

/* 2^n for whole numbers n inside the range of normal numbers, held as reals */
INLINE vec two_to(vec n) {
    const vec shift = all((real)(3LL << (DIGITS - 1)));
    return (vec)(((ivec)(n + shift) - (ivec)shift + BIAS) << DIGITS);
}

#if REAL_IS_DOUBLE
static const real LN2_HIGH = 0.6931471803691238164901733, LN2_LOW = 1.908214929270587816144266e-10;
static const real EXP[] = {
    0.5, 0.16666666666666671008, 0.041666666666666669767, 0.0083333333333261120526, 0.0013888888888883731828,
    0.00019841269874901259234, 0.000024801587325605322782, 2.7557255297969644392e-6, 2.7557273570102139673e-7,
    2.5105259538448493419e-8, 2.0914717341716375952e-9};
static const real ATANH[] = {
    0.66666666666666666668, 0.3999999999999999241, 0.285714285714354311, 0.22222222219837207325, 0.18181818596791219142,
    0.15384574886255248704, 0.13335649307440791396, 0.11687885432761245584, 0.11884154487784633016};
#define EXP_MOST 710.0
#define EXP_LEAST -746.0
#define TANH_MOST 44.0
#define SIGMOID_MOST 709.4
static const bits ROOT_HALF = 0x3fe6a09e667f3bcdLL;
#else
static const real LN2_HIGH = 0.693115234375f, LN2_LOW = 0.00003194618494530941723212146f;
static const real EXP[] = {
    0.5f, 0.16666576845993976311f, 0.041666554437685938899f, 0.0083632029715758549465f, 0.0013926213466332443037f};
static const real ATANH[] = {
    0.66666666553821972874f, 0.40000122391549318292f, 0.28550758267113831562f, 0.23332167963754724575f};
#define EXP_MOST 89.0f
#define EXP_LEAST -104.0f
#define TANH_MOST 20.0f
#define SIGMOID_MOST 88.3f
static const bits ROOT_HALF = 0x3f3504f3;
#endif

#define POLYNOMIAL(c, z) polynomial(c, sizeof(c) / sizeof(*c), z)
INLINE vec polynomial(const real *c, const int n, vec z) {
    vec r = all(c[n - 1]);
    UNROLLED for (int i = n - 2; i >= 0; i--) r = fma_(r, z, all(c[i]));
    return r;
}

/* a = n ln 2 + r with |r| <= ln 2 / 2 -> e^r - 1, with full relative accuracy; n is a whole number */
INLINE vec reduced(vec a, vec *n) {
    const vec shift = all((real)(3LL << (DIGITS - 1)));
    *n = fma_(a, all((real)1.442695040888963407359925), shift) - shift;
    vec r = fma_(*n, all(-LN2_LOW), fma_(*n, all(-LN2_HIGH), a));
    return fma_(r * r, POLYNOMIAL(EXP, r), r);
}

INLINE vec exp_(vec a) {
    vec n, least = all(EXP_LEAST), most = all(EXP_MOST);
    a = pick(a < least, least, pick(a > most, most, a));
    vec p = reduced(a, &n) + 1;
    const vec shift = all((real)(3LL << (DIGITS - 1)));
    vec half = fma_(n, all((real)0.5), shift) - shift; /* in two factors: 2^n alone may leave the range */
    return p * two_to(half) * two_to(n - half);
}

/* e^a - 1 = 2 (2^(n-1) (e^r - 1) + 2^(n-1) - 1/2): 2^n alone may leave the range */
INLINE vec expm1_(vec a) {
    vec n, least = all(-TANH_MOST), most = all(EXP_MOST);
    a = pick(a < least, least, pick(a > most, most, a));
    vec p = reduced(a, &n), half = two_to(n - 1);
    return 2 * fma_(p, half, half - (real)0.5);
}

INLINE vec tanh_(vec a) {
    vec n, y = magnitude(a) * 2, most = all(TANH_MOST);
    y = pick(y > most, most, y);
    vec p = reduced(y, &n), two_n = two_to(n);
    vec e = fma_(p, two_n, two_n - 1); /* e^2|a| - 1 */
    vec r = e / (e + 2);
    return (vec)((ivec)r | ((ivec)a & ((ivec){0} + ((bits)1 << (8 * sizeof(real) - 1)))));
}

/* 1 / (1 + e^-a), with e^-a held inside the range: what it leaves out is below the normal numbers */
INLINE vec sigmoid_(vec a) {
    vec n, most = all(SIGMOID_MOST);
    a = pick(a > most, most, pick(a < -most, -most, a));
    vec p = reduced(-a, &n), two_n = two_to(n);
    return 1 / (1 + fma_(p, two_n, two_n));
}

/* log(1 + w) for 1 + w = m between sqrt(1/2) and sqrt(2): 2 atanh(w / (2 + w)) */
INLINE vec log_near(vec w) {
    vec s = w / (w + 2), z = s * s;
    return fma_(s * z, POLYNOMIAL(ATANH, z), s + s);
}

INLINE vec log_(vec a) {
    ivec t = (ivec)a - ROOT_HALF, e = t >> DIGITS;
    vec m = (vec)((t & (((bits)1 << DIGITS) - 1)) + ROOT_HALF), n;
    for (int l = 0; l < L; l++) n[l] = (real)e[l];
    vec r = fma_(n, all(LN2_HIGH), fma_(n, all(LN2_LOW), log_near(m - 1)));
    r = pick(a == 0, all(-inf), r);
    r = pick((a == inf) | (a != a), a, r);
    return pick(a < 0, all(nan), r);
}

/* log(1 + a): what 1 + a was rounded by is added again beside its mantissa */
INLINE vec log1p_(vec a) {
    vec u = 1 + a, one = u - a;
    vec lost = (1 - one) + (a - (u - one)); /* 1 + a = u + lost, exactly */
    ivec t = (ivec)u - ROOT_HALF, e = t >> DIGITS;
    vec m = (vec)((t & (((bits)1 << DIGITS) - 1)) + ROOT_HALF), n;
    for (int l = 0; l < L; l++) n[l] = (real)e[l];
    vec most = all(BIAS - 1); /* 2^-n must not leave the range; `lost` is nothing beside such a u */
    vec w = fma_(lost, two_to(-pick(n > most, most, n)), m - 1);
    vec r = fma_(n, all(LN2_HIGH), fma_(n, all(LN2_LOW), log_near(w)));
    r = pick(a == -1, all(-inf), r);
    r = pick((a == inf) | (a != a), a, r);
    return pick(a < -1, all(nan), r);
}

/* log(1 + e^a) = max(a, 0) + log(1 + e^-|a|) */
INLINE vec softplus_(vec a) {
    vec u = exp_(-magnitude(a));
    ivec large = u > all((real)0.41421356237309504880);
    vec r = pick(large, fma_(all(LN2_HIGH), all(1), log_near(pick(large, (u - 1) * (real)0.5, all(0))) + LN2_LOW),
                 log_near(u));
    return pick(a <= 0, all(0), a) + r;
}

INLINE vec relu_(vec a) { return pick(a <= 0, all(0), a); }
INLINE vec step_(vec a) { return pick(a > 0, all(1), all(0)); }
INLINE vec sign_(vec a) { return pick(a > 0, all(1), pick(a < 0, all(-1), all(0))); }

#ifdef __AVX__
typedef bits half __attribute__((vector_size(BYTES / 2)));
typedef bits quarter __attribute__((vector_size(BYTES / 4)));
INLINE bits largest(ivec a) {
    union {
        ivec all;
        half two[2];
    } y = {a};
    union {
        half all;
        quarter two[2];
    } z = {(y.two[0] & (y.two[0] > y.two[1])) | (y.two[1] & ~(y.two[0] > y.two[1]))};
    quarter r = (z.two[0] & (z.two[0] > z.two[1])) | (z.two[1] & ~(z.two[0] > z.two[1]));
    bits most = r[0];
    for (unsigned l = 1; l < L / 4; l++) most = r[l] > most ? r[l] : most;
    return most;
}
#else
INLINE bits largest(ivec a) {
    bits most = a[0];
    for (int l = 1; l < L; l++) most = a[l] > most ? a[l] : most;
    return most;
}
#endif

/* ---- tiles of a product ---- */

INLINE long vectors(long n) { return (n + L - 1) / L; }
/* N columns are cut into panels of nearly equal width, at most WIDE vectors; panel i begins at vector edge(N, i) */
INLINE long panels(long N) { return (vectors(N) + WIDE - 1) / WIDE; }
INLINE long edge(long N, long i) { return vectors(N) * i / panels(N); }

/* ---- threads ---- */

/* Treat denormal numbers as zeros, and return the setting before: vanishing costates are made of them, and on
   some CPUs they take many times longer than zeros. */
INLINE uint64_t flush_denormals(void) {
#if defined(__SSE__)
    unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 0x8040);
    return before;
#elif defined(__aarch64__)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | (1 << 24)));
    return before;
#else
    return 0;
#endif
}

INLINE void restore_setting(uint64_t before) {
#if defined(__SSE__)
    __builtin_ia32_ldmxcsr((unsigned)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#endif
}

enum { MOST_THREADS = 64 };
struct share {
    void (*run)(const void *, long, long, real *);
    const void *job;
    long lo, hi;
    real *scratch;
};

static void *run_share(void *share) {
    struct share *y = share;
    uint64_t before = flush_denormals();
    y->run(y->job, y->lo, y->hi, y->scratch);
    restore_setting(before);
    return 0;
}

/* Run all shares at once, the first of them in the caller's thread. A thread that cannot be started runs there too. */
static void run_shares(struct share *shares, long count) {
    pthread_t thread[MOST_THREADS];
    int started[MOST_THREADS] = {0};
    for (long i = 1; i < count; i++) started[i] = !pthread_create(&thread[i], 0, run_share, &shares[i]);
    for (long i = 0; i < count; i++)
        if (!started[i]) run_share(&shares[i]);
    for (long i = 1; i < count; i++)
        if (started[i]) pthread_join(thread[i], 0);
}
