/* Samples and steps of a diagonal Gaussian on the CPU, in one pass over memory.
 *
 * The formulas are those of functional/diagonal.py, the random numbers those of noise.py, the table that of table.py.
 * The work of a call is numbered by tiles of the table, so that threads can share it. A tile goes through in chunks
 * that fit into the first-level cache: its noise is generated into a buffer, and then a chain of short loops (restore,
 * update, sample) runs over the chunk. Every entry point is made of the same loops, and the compiler may not contract
 * a*b+c, so the number that a sample adds is bit for bit the number that a restore or a step takes out again.
 *
 * Tensors of float32 that lie in memory in the order of their elements are worked on in place. All others, and the
 * last few elements of a tensor, go through float32 buffers.
 *
 * The file is compiled once for each instruction set. What is special to one is in the first section; plain C stands
 * in where none is known, or with -DVPROP_PORTABLE.
 */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* -- vectors ---------------------------------------------------------------------------------------------------- */

#if defined(VPROP_PORTABLE)
#define W 4
#elif defined(__AVX512F__) && defined(__AVX512DQ__)
#define W 16
#define X86(name) _mm512_##name
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define W 8
#define X86(name) _mm256_##name
#elif defined(__SSE2__)
#define W 4
#define X86(name) _mm_##name
#else
#define W 4
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint64_t vq __attribute__((vector_size(4 * W))); /* W/2 words of 32 bits, with room for a product */

#define ALL ((1u << W) - 1)

INLINE vf load(const float *from) {
    vf value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float *to, vf value) { memcpy(to, &value, sizeof value); }

#ifdef X86
#include <immintrin.h>

#if W == 4
typedef __m128i vx;
#elif W == 8
typedef __m256i vx;
#else
typedef __m512i vx;
#endif

INLINE vf all(float x) { return (vf)X86(set1_ps)(x); }
INLINE vf root(vf x) { return (vf)X86(sqrt_ps)(x); }
/* Where one operand is NaN these return the second. */
INLINE vf least_of(vf a, vf b) { return (vf)X86(min_ps)(a, b); }
INLINE vf most_of(vf a, vf b) { return (vf)X86(max_ps)(a, b); }
INLINE vf interleave_low(vf a, vf b) { return (vf)X86(unpacklo_ps)(a, b); }
INLINE vf interleave_high(vf a, vf b) { return (vf)X86(unpackhi_ps)(a, b); }
/* The product of the low halves; what is in the high halves does not matter. */
INLINE vq product(vq a, vq b) { return (vq)X86(mul_epu32)((vx)a, (vx)b); }

#if W == 16
INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps(a, b, c); }
INLINE vq xor3(vq a, vq b, vq c) { return (vq)_mm512_ternarylogic_epi64((vx)a, (vx)b, (vx)c, 0x96); }
INLINE vi join_words(vq low, vq high) { return (vi)_mm512_mask_shuffle_epi32((vx)low, 0xAAAA, (vx)high, _MM_PERM_CCAA); }
INLINE vf from_unsigned(vi x) { return (vf)_mm512_cvtepu32_ps((vx)x); }
INLINE unsigned bits_greater(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE unsigned bits_unequal(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
INLINE vf choose(unsigned bits, vf yes, vf no) { return (vf)_mm512_mask_blend_ps((__mmask16)bits, no, yes); }
#else
INLINE vi join_words(vq low, vq high) { return (vi)((low & 0xFFFFFFFF) | (high << 32)); }
INLINE vq xor3(vq a, vq b, vq c) { return a ^ b ^ c; }
INLINE vf choose(unsigned bits, vf yes, vf no) {
    for (int i = 0; i < W; i++)
        if (!(bits >> i & 1)) yes[i] = no[i];
    return yes;
}
#if W == 8
INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps(a, b, c); }
#else
INLINE vf fused(vf a, vf b, vf c) { return a * b + c; }
#endif
INLINE unsigned bits_greater(vf a, vf b) { return (unsigned)X86(movemask_ps)((vf)(a > b)); }
INLINE unsigned bits_unequal(vf a, vf b) { return (unsigned)X86(movemask_ps)((vf)(a != b)); }
#endif

#else /* not x86 */
#define EACH for (int i = 0; i < W; i++)
INLINE vf all(float x) { vf out; EACH out[i] = x; return out; }
INLINE vf root(vf x) { EACH x[i] = sqrtf(x[i]); return x; }
INLINE vf least_of(vf a, vf b) { EACH a[i] = a[i] < b[i] ? a[i] : b[i]; return a; }
INLINE vf most_of(vf a, vf b) { EACH a[i] = a[i] > b[i] ? a[i] : b[i]; return a; }
INLINE vf interleave_low(vf a, vf b) { return (vf){a[0], b[0], a[1], b[1]}; }
INLINE vf interleave_high(vf a, vf b) { return (vf){a[2], b[2], a[3], b[3]}; }
INLINE vq product(vq a, vq b) { return (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF); }
INLINE vi join_words(vq low, vq high) { return (vi)((low & 0xFFFFFFFF) | (high << 32)); }
INLINE vq xor3(vq a, vq b, vq c) { return a ^ b ^ c; }
INLINE vf fused(vf a, vf b, vf c) { return a * b + c; }
INLINE unsigned bits_greater(vf a, vf b) { unsigned out = 0; EACH out |= (unsigned)(a[i] > b[i]) << i; return out; }
INLINE unsigned bits_unequal(vf a, vf b) { unsigned out = 0; EACH out |= (unsigned)(a[i] != b[i]) << i; return out; }
INLINE vf choose(unsigned bits, vf yes, vf no) { EACH yes[i] = bits >> i & 1 ? yes[i] : no[i]; return yes; }
#endif

INLINE vf from_signed(vi x) { return __builtin_convertvector(x, vf); }

#if W != 16 || defined(VPROP_PORTABLE)
/* In two exact halves, so that it is rounded once. */
INLINE vf from_unsigned(vi x) {
    vi high = (x >> 16) & 0xFFFF, low = x & 0xFFFF;
    return from_signed(high) * 65536.0f + from_signed(low);
}
#endif

/* 1/√x. Dividing by a root costs several times as much as the processor's estimate and one step that mends it: with
 * e = 1 − x·y², 1/√x = y·(1 − e)^−½ = y·(1 + e/2 + 3e²/8 + …). For x = 0 and ∞ the estimate is exact and e is NaN. */
INLINE vf inverse_root(vf x) {
#if defined(X86)
#if W == 16
    vf y = (vf)_mm512_rsqrt14_ps(x);
#else
    vf y = (vf)X86(rsqrt_ps)(x);
#endif
    vf error = fused(-(x * y), y, all(1.0f));
#if W == 16
    vf change = y * (error * 0.5f); /* the estimate has 14 digits, so the next term is below rounding */
#else
    vf change = y * (error * fused(error, all(0.375f), all(0.5f)));
#endif
    return y + (vf)((vi)change & (vi)(error == error));
#else
    return 1.0f / root(x);
#endif
}

/* -- what Python passes: call.py, table.py ------------------------------------------------------------------------ */

enum { WEIGHT, HESS, MOMENTUM, MEAN, PRIOR_MEAN, PRIOR_PRECISION, GRAD, OTHER, ROLES };
enum { SIZE = ROLES, PARAMETER, FIRST_TILE, FIRST_BLOCK };
enum { FLOAT32, BFLOAT16, FLOAT16 };
enum { SQUARE, PRICE, PAIR, GIVEN };
enum { CLAMPED, RIEMANNIAN, VADAM, CLAMPED_ROOT, RIEMANNIAN_ROOT, CLAMPED_IDENTITY, RIEMANNIAN_IDENTITY, RULES };

#define TILE 4096
#define CHUNK 256 /* elements whose noise and roles fit into the first-level cache; divides TILE */
#define LINE 16 /* elements that memory delivers at once */
#define LEAST_PRECISION 1e-3
#define SMALLEST_SIZE 1e-8

typedef struct {
    int64_t rows;
    const int64_t *columns;  /* [12][rows]: the addresses by role, and the numbers above */
    const int64_t *geometry; /* NULL, or [rows][9][dims]: sizes, then strides by role */
    int64_t dims;
    const int64_t *steps; /* [rows] */
    const float *floors;  /* [rows]: what h+δ is not below */
    int64_t first_step;
    int32_t types[ROLES]; /* what the tensors of each role are kept in; they are computed with in float32 */
} Table;

typedef struct {
    uint64_t seed;
    uint32_t source;
    int32_t sign;
    double ess, damping;
} Noise;

typedef struct {
    Noise noise;
    int32_t sampled, curvature, rule, grad_sign;
    double scale, lr, beta1, beta2, clip_radius;
    double start_weight;   /* what the start of the average of h weighs */
    double gradient_scale; /* M of a root rule: √(h/M) is the size of a gradient */
} Step;

/* A chunk's roles in float32, in the order of the elements; NULL where there is none. It is passed by value, and so is
 * what else a loop reads: the compiler then knows that no store changes it. */
typedef struct {
    float *of[ROLES];
} Lanes;

/* -- random numbers: noise.py ----------------------------------------------------------------------------------- */

#define ROUNDS 10
#define TURNS 2
#define GROUP (2 * W * TURNS) /* normals that are generated together */

/* Everything of Philox's input but the element: the keys of all rounds, and three words of the counter. */
typedef struct {
    uint64_t keys[ROUNDS][2];
    uint64_t parameter, step, source;
} Draw;

static Draw draw_of(uint64_t seed, int64_t parameter, int64_t step, uint32_t source) {
    Draw draw = {.parameter = (uint32_t)parameter, .step = (uint32_t)step, .source = source};
    uint32_t low = (uint32_t)seed, high = (uint32_t)(seed >> 32);
    for (int round = 0; round < ROUNDS; round++, low += 0x9E3779B9, high += 0xBB67AE85) {
        draw.keys[round][0] = low;
        draw.keys[round][1] = high;
    }
    return draw;
}

/* The high half moves to the low one. What stays in the high half is never looked at: products ignore it. */
INLINE vq high_word(vq x) { return x >> 32; }

INLINE vq repeat(uint64_t word) { return (vq){0} + word; }

/* Four words for each counter. A round waits for the one before it, so several vectors take turns. */
INLINE void philox(vq word[TURNS][4], const Draw *draw) {
#pragma GCC unroll 10
    for (int round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 4
        for (int i = 0; i < TURNS; i++) {
            vq even = product(word[i][0], repeat(0xD2511F53)), odd = product(word[i][2], repeat(0xCD9E8D57));
            word[i][0] = xor3(high_word(odd), word[i][1], repeat(draw->keys[round][0]));
            word[i][2] = xor3(high_word(even), word[i][3], repeat(draw->keys[round][1]));
            word[i][1] = odd;
            word[i][3] = even;
        }
    }
}

/* √(−2·log u) for u = (word + ½)/2³², rounded like the portable code's.
 *
 * u = m·2^e with m in [√½, √2), and −2·log(1+f) = f·(−2 + f·Q(f)) with f = m−1, so that the radius keeps its relative
 * precision down to f = −2⁻²⁴. Q is the minimax polynomial: 3·10⁻⁸ of −2·log(1+f). The exponent is used in its place
 * in the word, 2²³ times too large. */
INLINE vf radius_of(vi word) {
    vf uniform = fused(from_unsigned(word), all(0x1p-32f), all(0x1p-33f)); /* the product is exact, fused or not */
    vi bits = (vi)uniform, exponent = (bits - 0x3F3504F3) & (int32_t)0xFF800000;
    vf f = (vf)(bits - exponent) - 1.0f;
    vf q = all(-0x1.65c6e6p-3f);
    q = fused(q, f, all(0x1.25046ep-2f));
    q = fused(q, f, all(-0x1.318530p-2f));
    q = fused(q, f, all(0x1.535d38p-2f));
    q = fused(q, f, all(-0x1.98d2bep-2f));
    q = fused(q, f, all(0x1.00049ap-1f));
    q = fused(q, f, all(-0x1.5556f4p-1f));
    q = fused(q, f, all(0x1.fffffap-1f));
    q = fused(q, f, all(-2.0f));
    return root(fused(from_signed(exponent), all(-2 * 0x1.62e430p-1f * 0x1p-23f), f * q));
}

/* radius·cos and radius·sin of 2π·word/2³².
 *
 * Without its first bit the word, as a signed number, is an angle of y·π/2 with y in [−1, 1). Half a turn, if the
 * first two bits differ, changes the sign of both results. Minimax polynomials in y²: 3·10⁻⁹ (sin), 2·10⁻¹⁰ (cos). */
INLINE void turn(vf radius, vi word, vf *cosine, vf *sine) {
    vi twice = word << 1;
    radius = (vf)((vi)radius ^ ((word ^ twice) & (int32_t)0x80000000));
    vf y = from_signed(twice) * 0x1p-31f, square = y * y;
    vf s = all(0x1.3c4b2ep-13f), c = all(-0x1.901bd8p-16f);
    s = fused(s, square, all(-0x1.3232fap-8f));
    s = fused(s, square, all(0x1.46676ep-4f));
    s = fused(s, square, all(-0x1.4abbb6p-1f));
    s = fused(s, square, all(0x1.921fb4p+0f));
    c = fused(c, square, all(0x1.e12f86p-11f));
    c = fused(c, square, all(-0x1.55d0b8p-6f));
    c = fused(c, square, all(0x1.03c1e6p-2f));
    c = fused(c, square, all(-0x1.3bd3ccp+0f));
    c = fused(c, square, all(1.0f));
    *cosine = radius * c;
    *sine = radius * (s * y);
}

/* The normals of elements first … first+count−1, where first is a multiple of 4. Writes up to the next multiple of
 * GROUP. All words come first, all normals then: two short loops keep the processor busier than a long one.
 *
 * A vector holds W/2 counters, in an order that leaves the results in that of the elements: interleaving works on
 * 128 bits at a time, and takes even counters for its lower and odd ones for its higher half.
 *
 * Generating takes about as long as memory takes to deliver, so what is in `soon` is asked for meanwhile: bit by bit,
 * because the processor keeps few requests open. */
static void normals(float *out, int64_t first, int64_t count, const Draw *address, Lanes soon) {
    const Draw copy = *address, *draw = &copy; /* which, as the compiler can tell, is not written to */
    vq block;
    for (int lane = 0; lane < W / 2; lane++) block[lane] = (uint64_t)(first / 4 + lane % 2 * (W / 4) + lane / 2);
    for (int64_t i = 0; i < count; i += GROUP) {
        for (int role = 0; role < ROLES; role++)
            for (int64_t ahead = 0; soon.of[role] && ahead < GROUP; ahead += LINE)
                __builtin_prefetch(soon.of[role] + i + ahead);
        vq word[TURNS][4];
#pragma GCC unroll 4
        for (int k = 0; k < TURNS; k++, block += W / 2) {
            word[k][0] = block;
            word[k][1] = repeat(draw->parameter);
            word[k][2] = repeat(draw->step);
            word[k][3] = repeat(draw->source);
        }
        philox(word, draw);
#pragma GCC unroll 4
        for (int k = 0; k < TURNS; k++) {
            store(out + i + 2 * W * k, (vf)join_words(word[k][0], word[k][2]));
            store(out + i + 2 * W * k + W, (vf)join_words(word[k][1], word[k][3]));
        }
    }
    for (int64_t i = 0; i < count; i += 2 * W) {
        vf cosine, sine;
        turn(radius_of((vi)load(out + i)), (vi)load(out + i + W), &cosine, &sine);
        store(out + i, interleave_low(cosine, sine));
        store(out + i + W, interleave_high(cosine, sine));
    }
}

/* -- loops over a chunk ------------------------------------------------------------------------------------------- */

/* σ as float32 numbers; δ = damping, or λ/ess where there is a tensor of prior precisions. */
typedef struct {
    float ess, inverse_ess, damping, least, sign;
    float floor; /* of the row */
} Width;

static Width width_of(const Noise *noise, int sign) {
    return (Width){
        .ess = (float)noise->ess,
        .inverse_ess = (float)(1 / noise->ess),
        .damping = (float)noise->damping,
        .least = (float)(LEAST_PRECISION * noise->damping),
        .sign = (float)sign,
    };
}

INLINE vf damping_at(const Width *width, const float *prior_precision, int64_t i) {
    return prior_precision ? load(prior_precision + i) * width->inverse_ess : all(width->damping);
}

/* h+δ, but no less than a share of δ. */
INLINE vf positive(const Width *width, const float *prior_precision, vf hess, vf damping) {
    vf least = prior_precision ? damping * (float)LEAST_PRECISION : all(width->least);
    return most_of(least, hess + damping);
}

/* 1/σ² = ess·max(h+δ, floor) */
INLINE vf precision_of(const Width *width, const float *prior_precision, vf hess, vf damping) {
    return width->ess * most_of(all(width->floor), positive(width, prior_precision, hess, damping));
}

/* ±σ·ε */
INLINE vf offset_at(const Width *width, const Lanes *lane, const float *noise, int64_t i) {
    const float *prior_precision = lane->of[PRIOR_PRECISION];
    vf damping = damping_at(width, prior_precision, i);
    vf precision = precision_of(width, prior_precision, load(lane->of[HESS] + i), damping);
    return width->sign * (load(noise + i) * inverse_root(precision));
}

/* θ = μ + offset */
static void sample(Lanes lane, const float *noise, int64_t n, Width width) {
    const float *mean = lane.of[MEAN] ? lane.of[MEAN] : lane.of[WEIGHT];
    for (int64_t i = 0; i < n; i += W) store(lane.of[WEIGHT] + i, load(mean + i) + offset_at(&width, &lane, noise, i));
}

/* μ = θ − offset */
static void restore(Lanes lane, const float *noise, int64_t n, Width width) {
    float *weight = lane.of[WEIGHT];
    if (lane.of[MEAN])
        memcpy(weight, lane.of[MEAN], (size_t)n * sizeof(float));
    else
        for (int64_t i = 0; i < n; i += W) store(weight + i, load(weight + i) - offset_at(&width, &lane, noise, i));
}

/* The numbers of an update in float32, and of a row its debiasing. */
typedef struct {
    Width width;
    float grad_sign, noise_sign, scale, lr, clip_radius;
    float weight1, weight2;           /* what the newest values weigh: 1−β, if all before count */
    float inverse_gradient_scale;
    float debias_grad, debias_hess;   /* 1/(1−βᵗ) */
} Update;

/* start + weight·(end − start), from the end that it is closer to, like torch.lerp */
INLINE vf between(vf start, vf end, float weight) {
    return weight < 0.5f ? start + weight * (end - start) : end + (weight - 1) * (end - start);
}

/* One step from the mean, which is in MEAN, or in WEIGHT where there is no such role. Both are written. NaN survives
 * every operation, so that it is found in the end: an element that would not be finite stays as it was. */
INLINE void update_as(
    Lanes lane, const float *noise, int64_t n, Update u, int64_t counts[2], int curvature, int rule, bool has_momentum
) {
    const Width *width = &u.width;
    const float *prior_precision = lane.of[PRIOR_PRECISION], *prior_mean = lane.of[PRIOR_MEAN];
    const float *mean_in = lane.of[MEAN] ? lane.of[MEAN] : lane.of[WEIGHT];
    for (int64_t i = 0; i < n; i += W) {
        unsigned live = n - i < W ? (1u << (n - i)) - 1 : ALL;
        vf mean = load(mean_in + i), hess = load(lane.of[HESS] + i);
        vf damping = damping_at(width, prior_precision, i);
        vf grad = u.grad_sign * load(lane.of[GRAD] + i), estimate;
        if (curvature == SQUARE) {
            estimate = u.scale * (grad * grad);
        } else if (curvature == PRICE) {
            vf precision = precision_of(width, prior_precision, hess, damping);
            estimate = grad * (u.noise_sign * load(noise + i)) * root(precision);
        } else if (curvature == PAIR) {
            vf other = load(lane.of[OTHER] + i), half = (other - grad) * 0.5f;
            estimate = u.scale * (half * half);
            grad = other + 0.5f * (grad - other);
        } else {
            estimate = u.scale * load(lane.of[OTHER] + i);
        }

        vf new_hess;
        if (rule == RIEMANNIAN || rule == RIEMANNIAN_ROOT || rule == RIEMANNIAN_IDENTITY) {
            vf change = u.weight2 * (estimate - hess), above = positive(width, prior_precision, hess, damping);
            vf floor = damping * (float)(LEAST_PRECISION - 1);
            new_hess = most_of(floor, hess + change + 0.5f * (change * change) / above);
        } else {
            new_hess = most_of(all(0), between(hess, estimate, u.weight2));
        }

        vf pull = damping * (prior_mean ? mean - load(prior_mean + i) : mean);
        vf averaged = rule == VADAM ? grad + pull : grad, momentum = averaged, new_momentum = averaged;
        if (has_momentum) {
            momentum = load(lane.of[MOMENTUM] + i);
            new_momentum = between(momentum, averaged, u.weight1);
            averaged = new_momentum * u.debias_grad;
        }
        vf direction;
        if (rule == VADAM)
            direction = averaged / (root(new_hess * u.debias_hess) + damping);
        else if (rule == CLAMPED_ROOT || rule == RIEMANNIAN_ROOT)
        {
            vf prior_square = pull * pull + damping * damping / precision_of(width, prior_precision, new_hess, damping);
            vf square = most_of(all(0), new_hess * u.inverse_gradient_scale) + prior_square;
            direction = (averaged + pull) / (root(square) + (float)SMALLEST_SIZE);
        }
        else if (rule == CLAMPED_IDENTITY || rule == RIEMANNIAN_IDENTITY)
            direction = averaged + pull;
        else
            direction = (averaged + pull) / most_of(all(width->floor), new_hess + damping);
        unsigned clipped = bits_greater(most_of(direction, -direction), all(u.clip_radius)) & live;
        direction = most_of(all(-u.clip_radius), least_of(all(u.clip_radius), direction));
        vf new_mean = mean - u.lr * direction;

        unsigned unusable = bits_unequal(grad * 0 + new_hess * 0 + new_mean * 0, all(0));
        if (rule == CLAMPED_IDENTITY || rule == RIEMANNIAN_IDENTITY) /* without any precision there is no next sample */
            unusable |= ~bits_greater(most_of(all(width->floor), new_hess + damping), all(0)) & ALL;
        if (unusable) {
            new_mean = choose(unusable, mean, new_mean);
            new_hess = choose(unusable, hess, new_hess);
            new_momentum = choose(unusable, momentum, new_momentum);
            counts[0] += __builtin_popcount(unusable & live);
        }
        if (clipped) counts[1] += __builtin_popcount(clipped);
        store(lane.of[WEIGHT] + i, new_mean);
        if (lane.of[MEAN]) store(lane.of[MEAN] + i, new_mean);
        store(lane.of[HESS] + i, new_hess);
        if (has_momentum) store(lane.of[MOMENTUM] + i, new_momentum);
    }
}

/* A loop of its own for each kind of update. */
static void update(
    Lanes lane, const float *noise, int64_t n, const Update *u, int64_t counts[2], int curvature, int rule
) {
#define RUN(c, r)                                                         \
    case RULES * c + r:                                                   \
        if (lane.of[MOMENTUM]) update_as(lane, noise, n, *u, counts, c, r, true); \
        else update_as(lane, noise, n, *u, counts, c, r, false);                  \
        break;
#define EACH_RULE(c) \
    RUN(c, CLAMPED) RUN(c, RIEMANNIAN) RUN(c, VADAM) RUN(c, CLAMPED_ROOT) RUN(c, RIEMANNIAN_ROOT) \
    RUN(c, CLAMPED_IDENTITY) RUN(c, RIEMANNIAN_IDENTITY)
    switch (RULES * curvature + rule) { EACH_RULE(SQUARE) EACH_RULE(PRICE) EACH_RULE(PAIR) EACH_RULE(GIVEN) }
}

/* -- between tensors and chunks ----------------------------------------------------------------------------------- */

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint16_t bfloat16_of(float x) {
    uint32_t bits = bits_of(x);
    return x != x ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16); /* to nearest, ties to even */
}

/* Without the sign a float16 is a float32 whose exponent is 112 too small, once the fractions are aligned; the product
 * also sees to subnormal numbers. */
INLINE float float16_value(uint16_t half) {
    uint32_t rest = (half & 0x7FFFu) << 13;
    float x = float_of(rest) * 0x1p112f;
    if (rest >= 0x7C00u << 13) x = float_of(rest | 0x7F800000);
    return float_of(bits_of(x) | (half & 0x8000u) << 16);
}

/* The processor rounds: added to a number whose last digit is that of the result, x loses what the result cannot hold. */
INLINE uint16_t float16_of(float x) {
    uint32_t sign = bits_of(x) >> 16 & 0x8000, rest = bits_of(x) & 0x7FFFFFFF, half;
    if (rest > 0x7F800000) half = 0x7E00;
    else if (rest >= 0x477FF000) half = 0x7C00; /* 65520, which rounds to infinity, and above */
    else if (rest < 0x38800000) half = bits_of(float_of(rest) + 0.5f) - 0x3F000000; /* subnormal */
    else half = (rest - 0x38000000 + 0xFFF + (rest >> 13 & 1)) >> 13;
    return (uint16_t)(sign | half);
}

static void widen(float *out, const uint16_t *in, int64_t n, int type) {
    int64_t i = 0;
    if (type == BFLOAT16) {
        for (; i < n; i++) out[i] = float_of((uint32_t)in[i] << 16);
        return;
    }
#ifdef __F16C__
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
#endif
    for (; i < n; i++) out[i] = float16_value(in[i]);
}

static void narrow(uint16_t *out, const float *in, int64_t n, int type) {
    int64_t i = 0;
    if (type == BFLOAT16) {
        for (; i < n; i++) out[i] = bfloat16_of(in[i]);
        return;
    }
#ifdef __F16C__
    for (; i + 8 <= n; i += 8) _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), 0));
#endif
    for (; i < n; i++) out[i] = float16_of(in[i]);
}

/* Where coarse weights do not match their mean, somebody else wrote to them: what is in the weights counts. */
static void reconcile(float *mean, const float *weight, int64_t n, int type) {
    float rounded[CHUNK];
    uint16_t halves[CHUNK];
    memcpy(rounded, mean, (size_t)n * sizeof(float));
    if (type != FLOAT32) {
        narrow(halves, mean, n, type);
        widen(rounded, halves, n, type);
    }
    for (int64_t i = 0; i < n; i++) mean[i] = rounded[i] == weight[i] ? mean[i] : weight[i];
}

/* One row of a table. */
typedef struct {
    char *base[ROLES]; /* NULL where it has no such tensor */
    int type[ROLES];
    int64_t size, parameter, first_tile, first_block, step;
    float floor;
    const int64_t *geometry;
    int64_t dims;
} Row;

static Row row_of(const Table *table, int64_t number) {
    Row row = {
        .size = table->columns[SIZE * table->rows + number],
        .parameter = table->columns[PARAMETER * table->rows + number],
        .first_tile = table->columns[FIRST_TILE * table->rows + number],
        .first_block = table->columns[FIRST_BLOCK * table->rows + number],
        .step = table->steps[number] + table->first_step,
        .floor = table->floors[number],
        .geometry = table->geometry ? table->geometry + number * (ROLES + 1) * table->dims : NULL,
        .dims = table->dims,
    };
    for (int role = 0; role < ROLES; role++) {
        row.base[role] = (char *)(intptr_t)table->columns[role * table->rows + number];
        row.type[role] = table->types[role];
    }
    return row;
}

/* Copies elements first … first+n−1, of `width` bytes, between a strided tensor and a buffer. */
static void copy_strided(const Row *row, int role, int64_t first, int64_t n, size_t width, char *buffer, bool out) {
    const int64_t *sizes = row->geometry, *strides = sizes + (role + 1) * row->dims;
    int64_t last = row->dims - 1;
    while (n > 0) {
        int64_t place = 0, rest = first, inner = first % sizes[last];
        for (int64_t dim = last; dim >= 0; rest /= sizes[dim], dim--) place += rest % sizes[dim] * strides[dim];
        int64_t run = sizes[last] - inner < n ? sizes[last] - inner : n;
        char *tensor = row->base[role] + place * (int64_t)width;
        int64_t stride = strides[last] * (int64_t)width;
        for (int64_t i = 0; i < run; i++, tensor += stride, buffer += width)
            if (out) memcpy(tensor, buffer, width);
            else memcpy(buffer, tensor, width);
        first += run;
        n -= run;
    }
}

/* Some elements of a row, with every role that is needed in float32 and in the order of the elements. */
typedef struct {
    const Row *row;
    int64_t first, n;
    Lanes lane; /* into the tensors, or into the buffers */
    float buffer[ROLES][CHUNK] __attribute__((aligned(64)));
} Chunk;

#define BIT(role) (1u << (role))

static void open_chunk(Chunk *chunk, const Row *row, int64_t first, int64_t n, unsigned roles) {
    chunk->row = row;
    chunk->first = first;
    chunk->n = n;
    bool whole = !row->geometry && n % W == 0;
    for (int role = 0; role < ROLES; role++) {
        chunk->lane.of[role] = NULL;
        if (!row->base[role] || !(roles & BIT(role))) continue;
        size_t width = row->type[role] == FLOAT32 ? 4 : 2;
        char *from = row->base[role] + first * (int64_t)width;
        if (whole && width == 4) {
            chunk->lane.of[role] = (float *)from;
            continue;
        }
        float *buffer = chunk->lane.of[role] = chunk->buffer[role];
        uint16_t halves[CHUNK];
        char *target = width == 4 ? (char *)buffer : (char *)halves;
        if (row->geometry) copy_strided(row, role, first, n, width, target, false);
        else memcpy(target, from, (size_t)n * width);
        if (width == 2) widen(buffer, halves, n, row->type[role]);
        for (int64_t i = n; i % W; i++) buffer[i] = 0;
    }
}

/* Writes back the roles that are not worked on in place. */
static void close_chunk(Chunk *chunk, unsigned roles) {
    const Row *row = chunk->row;
    for (int role = 0; role < ROLES; role++) {
        float *buffer = chunk->buffer[role];
        if (chunk->lane.of[role] != buffer || !(roles & BIT(role))) continue;
        size_t width = row->type[role] == FLOAT32 ? 4 : 2;
        uint16_t halves[CHUNK];
        char *from = (char *)buffer;
        if (width == 2) {
            narrow(halves, buffer, chunk->n, row->type[role]);
            from = (char *)halves;
        }
        if (row->geometry) copy_strided(row, role, chunk->first, chunk->n, width, from, true);
        else memcpy(row->base[role] + chunk->first * (int64_t)width, from, (size_t)chunk->n * width);
    }
}

/* -- walking the tiles of a table --------------------------------------------------------------------------------- */

/* The last row that starts at a tile or before it, which is the one that holds it: rows without elements have none. */
static int64_t row_with(const Table *table, int64_t tile) {
    const int64_t *first_tile = table->columns + FIRST_TILE * table->rows;
    int64_t low = 0, high = table->rows;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (first_tile[middle] <= tile) low = middle;
        else high = middle;
    }
    return low;
}

static bool starts_before(const Table *table, int64_t number, int64_t tile) {
    return number < table->rows && table->columns[FIRST_TILE * table->rows + number] < tile;
}

/* The elements of a row that are in tiles low … high−1: from *first up to the result. */
static int64_t elements_in(const Row *row, int64_t low, int64_t high, int64_t *first) {
    int64_t stop = (high - row->first_tile) * TILE;
    *first = low > row->first_tile ? (low - row->first_tile) * TILE : 0;
    return stop < row->size ? stop : row->size;
}

#define EACH_CHUNK(first, stop, n)                                                   \
    for (int64_t n; first < stop && (n = stop - first < CHUNK ? stop - first : CHUNK, true); first += n)

/* Writes a sample into the weights (direction 1), or takes it out again (−1). */
void perturb(const Table *table, const Noise *noise, int32_t direction, int64_t low, int64_t high) {
    Width width = width_of(noise, noise->sign);
    float values[CHUNK + GROUP] __attribute__((aligned(64)));
    Chunk chunk;
    for (int64_t number = row_with(table, low); starts_before(table, number, high); number++) {
        const Row row = row_of(table, number);
        int64_t first, stop = elements_in(&row, low, high, &first);
        const Draw draw = draw_of(noise->seed, row.parameter, row.step, noise->source);
        const bool has_mean = row.base[MEAN];
        width.floor = row.floor;
        EACH_CHUNK(first, stop, n) {
            open_chunk(&chunk, &row, first, n, BIT(WEIGHT) | BIT(HESS) | BIT(MEAN) | BIT(PRIOR_PRECISION));
            if (direction > 0 || !has_mean) normals(values, 4 * row.first_block + first, n, &draw, chunk.lane);
            if (direction > 0) {
                if (has_mean) reconcile(chunk.lane.of[MEAN], chunk.lane.of[WEIGHT], n, row.type[WEIGHT]);
                sample(chunk.lane, values, n, width);
            } else {
                restore(chunk.lane, values, n, width);
            }
            close_chunk(&chunk, BIT(WEIGHT) | (direction > 0 ? BIT(MEAN) : 0));
        }
    }
}

/* 1−βᵗ without the rounding of a difference. */
static double weight_so_far(double beta, int64_t step) { return beta > 0 ? -expm1((double)step * log(beta)) : 1; }

/* What the newest value weighs in the average of h, which may forget its start. */
static double newest_weight(const Step *step, int64_t count) {
    if (step->start_weight == 1) return 1 - step->beta2;
    double known = weight_so_far(step->beta2, count);
    return (1 - step->beta2) / (known + step->start_weight * (1 - known));
}

/* One update of mean and curvature; adds to `counts` how many elements were unusable, and clipped. */
void step(const Table *table, const Step *step, int64_t low, int64_t high, int64_t counts[2]) {
    const Noise *noise = &step->noise;
    Update u = {
        .width = width_of(noise, noise->sign),
        .grad_sign = (float)step->grad_sign,
        .noise_sign = (float)noise->sign,
        .scale = (float)step->scale,
        .lr = (float)step->lr,
        .clip_radius = (float)step->clip_radius,
        .weight1 = (float)(1 - step->beta1),
        .inverse_gradient_scale = (float)(1 / step->gradient_scale),
    };
    float values[CHUNK + GROUP] __attribute__((aligned(64)));
    Chunk chunk;
    for (int64_t number = row_with(table, low); starts_before(table, number, high); number++) {
        const Row row = row_of(table, number);
        int64_t first, stop = elements_in(&row, low, high, &first);
        const bool takes_part = row.base[GRAD], has_mean = row.base[MEAN];
        const bool needs_noise = (step->sampled && !has_mean) || (takes_part && step->curvature == PRICE);
        const Draw draw = draw_of(noise->seed, row.parameter, row.step - takes_part, noise->source);
        unsigned roles = BIT(WEIGHT) | BIT(HESS) | BIT(MEAN) | BIT(PRIOR_PRECISION), written = BIT(WEIGHT) | BIT(MEAN);
        if (takes_part) {
            roles |= BIT(MOMENTUM) | BIT(PRIOR_MEAN) | BIT(GRAD);
            written |= BIT(HESS) | BIT(MOMENTUM);
            if (step->curvature == PAIR || step->curvature == GIVEN) roles |= BIT(OTHER);
            u.debias_grad = (float)(1 / weight_so_far(step->beta1, row.step));
            u.debias_hess = (float)(1 / weight_so_far(step->beta2, row.step));
            u.weight2 = (float)newest_weight(step, row.step);
        }
        u.width.floor = row.floor;
        EACH_CHUNK(first, stop, n) {
            open_chunk(&chunk, &row, first, n, roles);
            if (needs_noise) normals(values, 4 * row.first_block + first, n, &draw, chunk.lane);
            if (step->sampled) restore(chunk.lane, values, n, u.width);
            else if (has_mean) reconcile(chunk.lane.of[MEAN], chunk.lane.of[WEIGHT], n, row.type[WEIGHT]);
            if (takes_part) update(chunk.lane, values, n, &u, counts, step->curvature, step->rule);
            close_chunk(&chunk, written);
        }
    }
}

/* The normals of elements start … start+count−1 of a parameter. */
void normal(
    float *out, int64_t start, int64_t count, int64_t parameter, int64_t step, uint32_t source, uint64_t seed
) {
    const Draw draw = draw_of(seed, parameter, step, source);
    float values[CHUNK + GROUP] __attribute__((aligned(64)));
    for (int64_t first = start - start % 4, stop = start + count; first < stop; first += CHUNK) {
        int64_t from = first < start ? start : first, to = first + CHUNK < stop ? first + CHUNK : stop;
        normals(values, first, to - first, &draw, (Lanes){{0}});
        memcpy(out + (from - start), values + (from - first), (size_t)(to - from) * sizeof(float));
    }
}

/* What the caller must agree on: the sizes of the structures above, and a number that changes with their meaning. */
int64_t layout(void) { return 5 + ((int64_t)sizeof(Step) << 16) + ((int64_t)sizeof(Table) << 32); }
