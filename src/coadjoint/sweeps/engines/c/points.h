/* One elementwise loop over rows, shared between threads. Put before this file: vectors.h, the loop, and SHIFTED(lo), its
   arguments: the arrays of `y`, those that have rows moved on by lo of them. */

struct points {
    long d;
    real **y;
};

static void points_share(const void *job, long lo, long hi, real *scratch) {
    const struct points *s = job;
    long d = s->d;
    real **y = s->y;
    points(hi - lo, d, SHIFTED(lo));
}

void run(int64_t m, int64_t d, int64_t threads, real **y) {
    struct points job = {d, y};
    struct share shares[MOST_THREADS];
    for (long i = 0; i < threads; i++)
        shares[i] = (struct share){points_share, &job, m * i / threads, m * (i + 1) / threads, 0};
    run_shares(shares, threads);
}
