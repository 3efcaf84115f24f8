/* The passes over whole models, each once through memory. passes.py says what they compute, and does it with numpy where
 * there was no compiler.
 *
 * Plain C without Python's headers: ctypes calls it, and lets go of the interpreter meanwhile. Sums have a fixed order
 * (16 lanes of float32 within a block of 256, blocks in float64), so that every processor gets the same bits; the file
 * is compiled without contraction to fused multiply-adds for the same reason.
 */
#include <limits.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bits are packed by way of little-endian words"
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EACH_PROCESSOR
#endif
#define INLINE static inline __attribute__((always_inline))

const int32_t peerd_kernels_version = 7; /* VERSION in library.py: of the functions' names and arguments */

enum { BLOCK = 256, LANES = 16 };

typedef float floats __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));

#define LOAD(vector, from) memcpy(&(vector), (from), sizeof(vector))

static const uint32_t SIGN_BIT = 0x80000000u, MAGNITUDE = 0x7fffffffu, LARGEST_FINITE = 0x7f7fffffu;
static const float ROUNDING = 12582912.0f; /* 1.5 * 2**23: adding and taking it away rounds to even */
static const float LEVELS = 127.0f, INT4_LEVELS = 7.0f;

/* The sum of squares of a block: in float32, which is exact enough, unless it leaves the range where that is so. */
INLINE double squares_of(const float *block, int count)
{
    floats sums = {0};
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        floats values;
        LOAD(values, block + i);
        sums += values * values;
    }
    double total = 0.0;
    for (int lane = 0; lane < LANES; lane++)
        total += sums[lane];
    for (; i < count; i++)
        total += (double)block[i] * block[i];
    if (total > 1e-20 && total < 1e38)
        return total;
    uint32_t any = 0; /* gradients of what was not used are zeros, and many */
    for (i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, block + i, sizeof bits);
        any |= bits & MAGNITUDE;
    }
    if (any == 0)
        return 0.0;
    total = 0.0;
    for (i = 0; i < count; i++)
        total += (double)block[i] * block[i];
    return total;
}

INLINE int smaller(int64_t left) { return left < BLOCK ? (int)left : BLOCK; }

INLINE void subtract(float *out, const float *values, const float *known, int count)
{
    if (known)
        for (int i = 0; i < count; i++)
            out[i] = values[i] - known[i];
    else
        memcpy(out, values, sizeof(float) * (size_t)count);
}

/* The bits of the largest magnitude: as integers, magnitudes have the order that they have as numbers. */
INLINE uint32_t largest_of(const float *block, int count)
{
    uint32_t largest = 0;
    for (int i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, block + i, sizeof bits);
        bits &= MAGNITUDE;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* The sum of magnitudes of a block, as squares_of. */
INLINE double magnitudes_of(const float *block, int count)
{
    floats sums = {0};
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        words values;
        LOAD(values, block + i);
        sums += (floats)(values & MAGNITUDE);
    }
    double total = 0.0;
    for (int lane = 0; lane < LANES; lane++)
        total += sums[lane];
    for (; i < count; i++)
        total += __builtin_fabsf(block[i]);
    if (total < 1e38)
        return total;
    total = 0.0;
    for (i = 0; i < count; i++)
        total += __builtin_fabsf(block[i]);
    return total;
}

/* `ranges` follow each other: the first ends at stops[0]. Their sums go to `squares`. */
EACH_PROCESSOR void peerd_squares(const float *values, const float *known, const int64_t *stops, int64_t ranges,
                                  double *squares)
{
    float apart[BLOCK];
    int64_t start = 0;
    for (int64_t range = 0; range < ranges; range++) {
        double total = 0.0;
        for (; start < stops[range]; start += BLOCK) {
            int size = smaller(stops[range] - start);
            if (known) {
                subtract(apart, values + start, known + start, size);
                total += squares_of(apart, size);
            } else {
                total += squares_of(values + start, size);
            }
        }
        start = stops[range];
        squares[range] = total;
    }
}

EACH_PROCESSOR void peerd_scale(float *values, const int64_t *stops, int64_t ranges, const double *factors)
{
    int64_t i = 0;
    for (int64_t range = 0; range < ranges; range++) {
        const float factor = (float)factors[range];
        for (; i < stops[range]; i++)
            values[i] *= factor;
    }
}

/* What every encoder says of its loss: decoded values go to `decoded` where that is wanted. */
INLINE void account(const float *apart, const float *arrives, float *decoded, int size, double *sums)
{
    float lost[BLOCK];
    subtract(lost, apart, arrives, size);
    sums[0] += squares_of(lost, size);
    sums[1] += squares_of(apart, size);
    if (decoded)
        memcpy(decoded, arrives, sizeof(float) * (size_t)size);
}

/* The bits of the nearest bfloat16 of a value that is not negative, ties away from zero; finite. */
INLINE uint32_t bfloat16_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = bits < 0x7f7f0000u ? bits + 0x8000u : 0x7f7f0000u;
    return bits & 0xffff0000u;
}

/* `bits` is a magnitude: each value of a block becomes it with the value's sign, and their signs are packed. */
INLINE void pack_signs(const float *apart, int size, uint32_t bits, float *arrives, uint8_t *packed)
{
    uint8_t negative[BLOCK];
    for (int i = 0; i < size; i++) {
        uint32_t value;
        memcpy(&value, apart + i, sizeof value);
        negative[i] = (uint8_t)(value >> 31);
        value = (value & SIGN_BIT) | bits;
        memcpy(arrives + i, &value, sizeof value);
    }
    memset(negative + size, 0, (size_t)(BLOCK - size));
    for (int i = 0; i < size; i += 8) { /* eight bytes of 0 or 1 to eight bits, the first the highest */
        uint64_t eight;
        memcpy(&eight, negative + i, sizeof eight);
        *packed++ = (uint8_t)((eight * 0x8040201008040201u) >> 56);
    }
}

/* The other way; `signs` has the eight sign bits of each byte. */
INLINE void unpack_signs(const uint8_t *packed, const uint32_t *signs, int size, uint32_t bits, float *out)
{
    int i = 0;
    for (; i + 8 <= size; i += 8) {
        uint32_t eight[8];
        const uint32_t *row = signs + 8 * *packed++;
        for (int lane = 0; lane < 8; lane++)
            eight[lane] = row[lane] ^ bits;
        memcpy(out + i, eight, sizeof eight);
    }
    for (int lane = 0; i + lane < size; lane++) {
        uint32_t value = signs[8 * *packed + lane] ^ bits;
        memcpy(out + i + lane, &value, sizeof value);
    }
}

EACH_PROCESSOR int peerd_sign_encode(const float *values, const float *known, int64_t count, uint16_t *scales,
                                     uint8_t *packed, float *decoded, double *sums)
{
    float apart[BLOCK], arrives[BLOCK];
    for (int64_t start = 0; start < count; start += BLOCK) {
        int size = smaller(count - start);
        subtract(apart, values + start, known ? known + start : 0, size);
        if (largest_of(apart, size) > LARGEST_FINITE)
            return 1;
        const uint32_t bits = bfloat16_of((float)(magnitudes_of(apart, size) / size));
        *scales++ = (uint16_t)(bits >> 16);
        pack_signs(apart, size, bits, arrives, packed);
        packed += BLOCK / 8;
        account(apart, arrives, decoded ? decoded + start : 0, size, sums);
    }
    return 0;
}

/* `scales` have been checked. */
EACH_PROCESSOR void peerd_sign_decode(const uint8_t *scales, const uint8_t *packed, const uint32_t *signs,
                                      int64_t count, float *out)
{
    for (int64_t start = 0; start < count; start += BLOCK) {
        uint16_t half;
        memcpy(&half, scales, sizeof half); /* bodies lie at any byte */
        scales += sizeof half;
        unpack_signs(packed, signs, smaller(count - start), (uint32_t)half << 16, out + start);
        packed += BLOCK / 8;
    }
}

/* What stands before the signs of a block: see codecs/sign_largest.py. */
typedef struct {
    uint16_t largest;
    uint8_t where, ratio;
} Head;

#define FIRST_BITS_OF_ONE (127 * 8)
#define NO_RATIO 255

INLINE uint8_t ratio_of(double mean, uint32_t largest)
{
    float value, share;
    memcpy(&value, &largest, sizeof value);
    share = value > 0.0f ? (float)(mean / value) : 0.0f;
    uint32_t bits;
    memcpy(&bits, &share, sizeof bits);
    const int32_t ratio = FIRST_BITS_OF_ONE - (int32_t)((bits + (1u << 19)) >> 20);
    return (uint8_t)(ratio < 0 ? 0 : ratio > NO_RATIO ? NO_RATIO : ratio);
}

INLINE uint32_t share_of(uint8_t ratio, uint32_t largest)
{
    if (ratio == NO_RATIO)
        return 0;
    uint32_t bits = (uint32_t)(FIRST_BITS_OF_ONE - ratio) << 20;
    float share, value;
    memcpy(&share, &bits, sizeof share);
    memcpy(&value, &largest, sizeof value);
    value *= share;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE void set_magnitude(float *value, uint32_t magnitude)
{
    uint32_t bits;
    memcpy(&bits, value, sizeof bits);
    bits = (bits & SIGN_BIT) | magnitude;
    memcpy(value, &bits, sizeof bits);
}

EACH_PROCESSOR int peerd_sign_largest_encode(const float *values, const float *known, int64_t count, Head *heads,
                                             uint8_t *packed, float *decoded, double *sums)
{
    float apart[BLOCK], arrives[BLOCK];
    for (int64_t start = 0; start < count; start += BLOCK) {
        int size = smaller(count - start), where = 0;
        subtract(apart, values + start, known ? known + start : 0, size);
        const uint32_t most = largest_of(apart, size);
        if (most > LARGEST_FINITE)
            return 1;
        uint32_t bits;
        for (; memcpy(&bits, apart + where, sizeof bits), (bits & MAGNITUDE) != most; where++)
            ;
        float magnitude;
        memcpy(&magnitude, &most, sizeof magnitude);
        const uint32_t largest = bfloat16_of(magnitude);
        const float kept = apart[where];
        apart[where] = 0.0f; /* taken from the sum afterwards, it would leave its rounding in it */
        const double mean = magnitudes_of(apart, size) / (size > 1 ? size - 1 : 1);
        apart[where] = kept;
        const uint8_t ratio = ratio_of(mean, largest);
        *heads++ = (Head){(uint16_t)(largest >> 16), (uint8_t)where, ratio};
        pack_signs(apart, size, share_of(ratio, largest), arrives, packed);
        packed += BLOCK / 8;
        set_magnitude(arrives + where, largest);
        account(apart, arrives, decoded ? decoded + start : 0, size, sums);
    }
    return 0;
}

/* `heads` have been checked. */
EACH_PROCESSOR void peerd_sign_largest_decode(const uint8_t *heads, const uint8_t *packed, const uint32_t *signs,
                                              int64_t count, float *out)
{
    for (int64_t start = 0; start < count; start += BLOCK) {
        Head head;
        memcpy(&head, heads, sizeof head); /* bodies lie at any byte */
        heads += sizeof head;
        const uint32_t largest = (uint32_t)head.largest << 16;
        unpack_signs(packed, signs, smaller(count - start), share_of(head.ratio, largest), out + start);
        packed += BLOCK / 8;
        set_magnitude(out + start + head.where, largest);
    }
}

/* The nearest whole number within [-levels, levels], ties to even. */
INLINE float rounded(float quotient, float levels)
{
    quotient = quotient < levels ? quotient : levels;
    quotient = quotient > -levels ? quotient : -levels;
    return (quotient + ROUNDING) - ROUNDING;
}

EACH_PROCESSOR int peerd_int8_encode(const float *values, const float *known, int64_t count, float *scales,
                                     int8_t *multiples, float *decoded, double *sums, float smallest, float largest)
{
    float apart[BLOCK], arrives[BLOCK];
    for (int64_t start = 0; start < count; start += BLOCK) {
        int size = smaller(count - start);
        subtract(apart, values + start, known ? known + start : 0, size);
        const uint32_t bits = largest_of(apart, size);
        if (bits > LARGEST_FINITE)
            return 1;
        float most;
        memcpy(&most, &bits, sizeof most);
        float scale = most / LEVELS;
        scale = scale < smallest ? smallest : scale > largest ? largest : scale;
        for (int i = 0; i < size; i++) { /* where a scale was held within its range, a quotient may be beyond 127 */
            const float quotient = rounded(apart[i] / scale, LEVELS);
            multiples[start + i] = (int8_t)(int32_t)quotient;
            arrives[i] = quotient;
        }
        if (most == 0.0f)
            scale = 0.0f;
        for (int i = 0; i < size; i++)
            arrives[i] *= scale;
        *scales++ = scale;
        account(apart, arrives, decoded ? decoded + start : 0, size, sums);
    }
    return 0;
}

/* Returns 1 for a multiple of -128; `scales` have been checked. */
EACH_PROCESSOR int peerd_int8_decode(const uint8_t *scales, const int8_t *multiples, int64_t count, float *out)
{
    int beyond = 0;
    for (int64_t start = 0; start < count; start += BLOCK) {
        int size = smaller(count - start);
        float scale;
        memcpy(&scale, scales, sizeof scale);
        scales += sizeof scale;
        for (int i = 0; i < size; i++) {
            int32_t multiple = multiples[start + i];
            beyond |= multiple == -128;
            out[start + i] = (float)multiple * scale;
        }
    }
    return beyond;
}

EACH_PROCESSOR int peerd_int4_encode(const float *values, const float *known, int64_t count, uint16_t *scales,
                                     uint8_t *packed, float *decoded, double *sums, float largest)
{
    float apart[BLOCK], arrives[BLOCK];
    uint8_t nibbles[BLOCK];
    for (int64_t start = 0; start < count; start += BLOCK) {
        int size = smaller(count - start);
        subtract(apart, values + start, known ? known + start : 0, size);
        uint32_t bits = largest_of(apart, size);
        if (bits > LARGEST_FINITE)
            return 1;
        float scale;
        memcpy(&scale, &bits, sizeof scale);
        bits = bfloat16_of(scale / INT4_LEVELS);
        memcpy(&scale, &bits, sizeof scale);
        scale = scale > largest ? largest : scale;
        memcpy(&bits, &scale, sizeof bits);
        *scales++ = (uint16_t)(bits >> 16);
        const float unit = scale > 0.0f ? scale : __builtin_inff(); /* no digits are left */
        for (int i = 0; i < size; i++) { /* where a scale lost digits, a quotient may be beyond 7 */
            const float quotient = rounded(apart[i] / unit, INT4_LEVELS);
            nibbles[i] = (uint8_t)((int32_t)quotient & 15);
            arrives[i] = quotient * scale;
        }
        memset(nibbles + size, 0, (size_t)(BLOCK - size));
        for (int i = 0; 2 * i < size; i++) {
            uint16_t pair;
            memcpy(&pair, nibbles + 2 * i, sizeof pair);
            packed[i] = (uint8_t)(pair | pair >> 4);
        }
        packed += BLOCK / 2;
        account(apart, arrives, decoded ? decoded + start : 0, size, sums);
    }
    return 0;
}

/* Returns 1 for a multiple of -8; `scales` have been checked. */
EACH_PROCESSOR int peerd_int4_decode(const uint8_t *scales, const uint8_t *packed, int64_t count, float *out)
{
    int beyond = 0;
    for (int64_t start = 0; start < count; start += BLOCK) {
        int size = smaller(count - start);
        uint8_t nibbles[BLOCK];
        uint16_t half;
        memcpy(&half, scales, sizeof half); /* bodies lie at any byte */
        scales += sizeof half;
        const uint32_t bits = (uint32_t)half << 16;
        float scale;
        memcpy(&scale, &bits, sizeof scale);
        for (int i = 0; 2 * i < size; i++) {
            const uint16_t pair = (uint16_t)((packed[i] & 15) | packed[i] >> 4 << 8);
            memcpy(nibbles + 2 * i, &pair, sizeof pair);
            beyond |= (packed[i] & 15) == 8 || packed[i] >> 4 == 8;
        }
        packed += BLOCK / 2;
        for (int i = 0; i < size; i++)
            out[start + i] = (float)((nibbles[i] ^ 8) - 8) * scale;
    }
    return beyond;
}

/* Where |values - known| is `least` or more, in order, and these differences: `where` and `large` have room for all.
 * Returns how many, or -1 where a difference is not finite; `others` gets the squares of all others. */
EACH_PROCESSOR int64_t peerd_at_least(const float *values, const float *known, int64_t count, float least,
                                      int64_t *where, float *large, double *others)
{
    float apart[BLOCK];
    uint8_t enough[BLOCK];
    int64_t found = 0;
    uint32_t threshold;
    memcpy(&threshold, &least, sizeof threshold);
    double total = 0.0;
    for (int64_t start = 0; start < count; start += BLOCK) {
        int size = smaller(count - start);
        subtract(apart, values + start, known ? known + start : 0, size);
        if (largest_of(apart, size) > LARGEST_FINITE)
            return -1;
        for (int i = 0; i < size; i++) {
            uint32_t bits;
            memcpy(&bits, apart + i, sizeof bits);
            enough[i] = (bits & MAGNITUDE) >= threshold;
        }
        memset(enough + size, 0, (size_t)(BLOCK - size));
        for (int first = 0; first < size; first += 64) {
            uint64_t set = 0; /* the first value's bit is the lowest: a branch for each 64 values, and for each found */
            for (int byte = 0; byte < 8; byte++) {
                uint64_t eight;
                memcpy(&eight, enough + first + 8 * byte, sizeof eight);
                set |= ((eight * 0x0102040810204080u) >> 56) << 8 * byte;
            }
            for (; set; set &= set - 1) {
                const int i = first + __builtin_ctzll(set);
                where[found] = start + i;
                large[found++] = apart[i];
                apart[i] = 0.0f;
            }
        }
        total += squares_of(apart, size);
    }
    *others = total;
    return found;
}

/* out = values + known, or values where there is no `known`; returns 1 where one is beyond `most`, or no number. */
EACH_PROCESSOR int peerd_add_within(const float *values, const float *known, int64_t count, float most, float *out)
{
    int beyond = 0;
    for (int64_t i = 0; i < count; i++) {
        float sum = known ? values[i] + known[i] : values[i];
        out[i] = sum;
        beyond |= !(__builtin_fabsf(sum) <= most);
    }
    return beyond;
}

/* mine += outgoing; theirs = next; next -= mine. `squares` gets those of `next` as it is then, as peerd_squares. */
EACH_PROCESSOR void peerd_move_references(float *mine, const float *outgoing, float *theirs, float *next,
                                          const int64_t *stops, int64_t ranges, double *squares)
{
    int64_t start = 0;
    for (int64_t range = 0; range < ranges; range++) {
        double total = 0.0;
        for (; start < stops[range]; start += BLOCK) {
            int size = smaller(stops[range] - start);
            float *m = mine + start, *t = theirs + start, *n = next + start;
            const float *o = outgoing + start;
            for (int i = 0; i < size; i++) {
                float moved = m[i] + o[i], came = n[i];
                m[i] = moved;
                t[i] = came;
                n[i] = came - moved;
            }
            total += squares_of(n, size);
        }
        start = stops[range];
        squares[range] = total;
    }
}

/* out = values + correction. Adds to totals: the squares of the sums, and of the correction. */
EACH_PROCESSOR void peerd_add(const float *values, const float *correction, float *out, int64_t count, double *totals)
{
    for (int64_t start = 0; start < count; start += BLOCK) {
        int size = smaller(count - start);
        for (int i = 0; i < size; i++)
            out[start + i] = values[start + i] + correction[start + i];
        totals[0] += squares_of(out + start, size);
        totals[1] += squares_of(correction + start, size);
    }
}

/* mean = summed / members, into gradient. Adds to totals: the squares of the mean, and of what gradient was, less it. */
EACH_PROCESSOR void peerd_mean(float *gradient, const float *summed, int64_t count, float members, double *totals)
{
    for (int64_t start = 0; start < count; start += BLOCK) {
        int size = smaller(count - start);
        float mean[BLOCK], apart[BLOCK];
        for (int i = 0; i < size; i++)
            mean[i] = summed[start + i] / members;
        for (int i = 0; i < size; i++)
            apart[i] = gradient[start + i] - mean[i];
        memcpy(gradient + start, mean, size * sizeof *mean);
        totals[0] += squares_of(mean, size);
        totals[1] += squares_of(apart, size);
    }
}

INLINE float power_of_two(uint32_t biased)
{
    uint32_t bits = biased << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* Whole multiples of a power of two, one for each block: exponents are those of the block's largest value, as float32
 * stores them, 15 at least; the unit is 2^-15 of the next power. See pairs/block_floats.py. */
INLINE uint8_t pack_block(const float *values, int size, int16_t *multiples)
{
    uint32_t exponent = largest_of(values, size) >> 23;
    exponent = exponent < 15 ? 15 : exponent;
    const float each = power_of_two(268 - exponent);
    for (int i = 0; i < size; i++) {
        float scaled = values[i] * each;
        scaled = scaled < 32767.0f ? scaled : 32767.0f;
        scaled = scaled > -32767.0f ? scaled : -32767.0f;
        scaled += ROUNDING; /* whose last bits are the whole number now */
        uint32_t bits;
        memcpy(&bits, &scaled, sizeof bits);
        multiples[i] = (int16_t)bits;
    }
    return (uint8_t)exponent;
}

INLINE void unpack_block(const int16_t *multiples, uint8_t exponent, int size, float *values)
{
    const float unit = power_of_two(exponent - 14u);
    for (int i = 0; i < size; i++)
        values[i] = (float)multiples[i] * unit;
}

EACH_PROCESSOR void peerd_blocks_pack(const float *values, int64_t count, int16_t *multiples, uint8_t *exponents)
{
    for (int64_t start = 0; start < count; start += BLOCK)
        exponents[start / BLOCK] = pack_block(values + start, smaller(count - start), multiples + start);
}

EACH_PROCESSOR void peerd_blocks_unpack(const int16_t *multiples, const uint8_t *exponents, int64_t count, float *out)
{
    for (int64_t start = 0; start < count; start += BLOCK)
        unpack_block(multiples + start, exponents[start / BLOCK], smaller(count - start), out + start);
}

INLINE void move_block(int16_t *mine, uint8_t *of_mine, const float *outgoing, int16_t *theirs, uint8_t *of_theirs,
                       float *next, int size)
{
    float moved[BLOCK];
    unpack_block(mine, *of_mine, size, moved);
    for (int i = 0; i < size; i++)
        moved[i] += outgoing[i];
    *of_mine = pack_block(moved, size, mine);
    *of_theirs = pack_block(next, size, theirs);
    for (int i = 0; i < size; i++)
        next[i] -= moved[i];
}

/* peerd_move_references of two references in such blocks, without the squares. */
EACH_PROCESSOR void peerd_blocks_move(int16_t *mine, uint8_t *of_mine, const float *outgoing, int16_t *theirs,
                                      uint8_t *of_theirs, float *next, int64_t count)
{
    for (int64_t start = 0; start < count; start += BLOCK) {
        int64_t block = start / BLOCK;
        if (count - start >= BLOCK) /* whose length the compiler knows */
            move_block(mine + start, of_mine + block, outgoing + start, theirs + start, of_theirs + block, next + start,
                       BLOCK);
        else
            move_block(mine + start, of_mine + block, outgoing + start, theirs + start, of_theirs + block, next + start,
                       (int)(count - start));
    }
}

/* A weight in bfloat16 and its carry, the lower half of its float32, which is to be added to the bits of the upper one.
 * See model/carries.py. */
INLINE float joined(uint16_t upper, int16_t lower)
{
    int32_t added = (upper & 0x7fff) || lower > 0 ? lower : 0;
    added = (upper & 0x7f80) == 0x7f80 ? 0 : added;
    uint32_t bits = ((uint32_t)upper << 16) + (uint32_t)added;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint16_t upper_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x8000u) >> 16);
}

INLINE int16_t lower_of(float value, uint16_t upper)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (int16_t)(bits - ((uint32_t)upper << 16));
}

EACH_PROCESSOR void peerd_carry_join(const uint16_t *upper, const int16_t *lower, int64_t count, float *out)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = joined(upper[i], lower[i]);
}

EACH_PROCESSOR void peerd_carry_part(const float *exact, int64_t count, uint16_t *upper, int16_t *lower)
{
    for (int64_t i = 0; i < count; i++) {
        upper[i] = upper_of(exact[i]);
        lower[i] = lower_of(exact[i], upper[i]);
    }
}

/* Weights and carries get delta; what they were, in bfloat16 too, moves as the weights do. Of a weight that is not finite
 * what it was and the carry get it. */
EACH_PROCESSOR void peerd_carry_add(const float *delta, uint16_t *upper, int16_t *lower, uint16_t *were, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        const uint16_t before = upper[i], was = were[i];
        const float whole = joined(before, lower[i]) + delta[i];
        const float other = joined(was, lower[i]) + delta[i]; /* of each, or the compiler makes no vectors of them */
        const int broken = !__builtin_isfinite(whole);
        const float exact = broken ? other : whole;
        const uint16_t after = upper_of(exact);
        const float moved = joined(after, 0) - joined(before, 0);
        const uint16_t further = upper_of(joined(was, 0) + moved);
        lower[i] = lower_of(exact, after);
        upper[i] = broken ? before : after;
        were[i] = broken ? after : further;
    }
}

EACH_PROCESSOR int peerd_is_finite(const float *values, int64_t count)
{
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        bits &= MAGNITUDE;
        largest = bits > largest ? bits : largest;
    }
    return largest <= LARGEST_FINITE;
}
