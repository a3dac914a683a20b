/* y_i M' + b for every row.

   Put before this file: vectors.h, product.h. */

enum { ROW_BLOCK = 256 }; /* rows that stay in cache while the panels of M pass by */
struct affine {
    int64_t N, n, m, threads, transposed; /* y [N, n], out [N, m]; M is [m, n] if transposed, else [n, m] */
    int64_t y_step;                       /* values from one row to the next */
    const real *y, *M, *b;                /* b may be 0 */
    real *out;
};
struct affine_job {
    const struct affine *affine;
    const real *panels;
};

static void affine_share(const void *given, long lo, long hi, real *scratch) {
    const struct affine_job *job = given;
    const struct affine *s = job->affine;
    for (long i = lo; i < hi; i += ROW_BLOCK) {
        long count = hi - i < ROW_BLOCK ? hi - i : ROW_BLOCK;
        product(count, s->m, s->n, s->y + i * s->y_step, s->y_step, job->panels, s->b, 0, s->out + i * s->m, s->m);
    }
}

/* Return 1 if there is no memory, else 0. Each thread takes some of the rows. */
int affine_rows(const struct affine *s) {
    struct share shares[MOST_THREADS];
    char *memory = malloc(sizeof(real) * vectors(s->m) * L * s->n + 64);
    if (!memory) return 1;
    struct affine_job job = {s, (real *)(memory + 64 - (uintptr_t)memory % 64)};
    pack_weights((real *)job.panels, s->M, s->n, s->m, s->transposed);
    for (long i = 0; i < s->threads; i++)
        shares[i] = (struct share){affine_share, &job, s->N * i / s->threads, s->N * (i + 1) / s->threads, 0};
    run_shares(shares, s->threads);
    free(memory);
    return 0;
}
