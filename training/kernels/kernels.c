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

/* Of a whole block, as nearly all are, the compiler knows the length: its loops need no ends. */
#define SIZED(function, size, ...) ((size) == BLOCK ? function(BLOCK, __VA_ARGS__) : function((size), __VA_ARGS__))

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
INLINE void unpack_signs(int size, const uint8_t *packed, const uint32_t *signs, uint32_t bits, float *out)
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

/* Encoders of a block return 1 where a value is not finite. */
INLINE int sign_block(int size, const float *values, const float *known, uint16_t *scale, uint8_t *packed,
                      float *decoded, double *sums)
{
    float apart[BLOCK], arrives[BLOCK];
    subtract(apart, values, known, size);
    if (largest_of(apart, size) > LARGEST_FINITE)
        return 1;
    const uint32_t bits = bfloat16_of((float)(magnitudes_of(apart, size) / size));
    *scale = (uint16_t)(bits >> 16);
    pack_signs(apart, size, bits, arrives, packed);
    account(apart, arrives, decoded, size, sums);
    return 0;
}

EACH_PROCESSOR int peerd_sign_encode(const float *values, const float *known, int64_t count, uint16_t *scales,
                                     uint8_t *packed, float *decoded, double *sums)
{
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int size = smaller(count - start);
        if (SIZED(sign_block, size, values + start, known ? known + start : 0, scales++, packed,
                  decoded ? decoded + start : 0, sums))
            return 1;
        packed += BLOCK / 8;
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
        const int size = smaller(count - start);
        SIZED(unpack_signs, size, packed, signs, (uint32_t)half << 16, out + start);
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

INLINE int sign_largest_block(int size, const float *values, const float *known, Head *head, uint8_t *packed,
                              float *decoded, double *sums)
{
    float apart[BLOCK], arrives[BLOCK];
    subtract(apart, values, known, size);
    const uint32_t most = largest_of(apart, size);
    if (most > LARGEST_FINITE)
        return 1;
    int where = BLOCK; /* the first of the largest, without a branch for each value */
    for (int i = 0; i < size; i++) {
        uint32_t bits;
        memcpy(&bits, apart + i, sizeof bits);
        const int place = (bits & MAGNITUDE) == most ? i : BLOCK;
        where = place < where ? place : where;
    }
    float magnitude;
    memcpy(&magnitude, &most, sizeof magnitude);
    const uint32_t largest = bfloat16_of(magnitude);
    const float kept = apart[where];
    apart[where] = 0.0f; /* taken from the sum afterwards, it would leave its rounding in it */
    const double mean = magnitudes_of(apart, size) / (size > 1 ? size - 1 : 1);
    apart[where] = kept;
    const uint8_t ratio = ratio_of(mean, largest);
    *head = (Head){(uint16_t)(largest >> 16), (uint8_t)where, ratio};
    pack_signs(apart, size, share_of(ratio, largest), arrives, packed);
    set_magnitude(arrives + where, largest);
    account(apart, arrives, decoded, size, sums);
    return 0;
}

EACH_PROCESSOR int peerd_sign_largest_encode(const float *values, const float *known, int64_t count, Head *heads,
                                             uint8_t *packed, float *decoded, double *sums)
{
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int size = smaller(count - start);
        if (SIZED(sign_largest_block, size, values + start, known ? known + start : 0, heads++, packed,
                  decoded ? decoded + start : 0, sums))
            return 1;
        packed += BLOCK / 8;
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
        const int size = smaller(count - start);
        SIZED(unpack_signs, size, packed, signs, share_of(head.ratio, largest), out + start);
        packed += BLOCK / 8;
        set_magnitude(out + start + head.where, largest);
    }
}

/* The nearest whole number within [-levels, levels], ties to even, in the lowest bits of what is returned. */
INLINE float rounded(float quotient, float levels)
{
    quotient = quotient < levels ? quotient : levels;
    quotient = quotient > -levels ? quotient : -levels;
    return quotient + ROUNDING;
}

INLINE int int8_block(int size, const float *values, const float *known, float *scale_of, int8_t *multiples,
                      float *decoded, double *sums, float smallest, float largest)
{
    float apart[BLOCK], arrives[BLOCK];
    subtract(apart, values, known, size);
    const uint32_t bits = largest_of(apart, size);
    if (bits > LARGEST_FINITE)
        return 1;
    float most;
    memcpy(&most, &bits, sizeof most);
    float scale = most / LEVELS;
    scale = scale < smallest ? smallest : scale > largest ? largest : scale;
    for (int i = 0; i < size; i++) { /* where a scale was held within its range, a quotient may be beyond 127 */
        const float multiple = rounded(apart[i] / scale, LEVELS) - ROUNDING;
        multiples[i] = (int8_t)(int32_t)multiple;
        arrives[i] = multiple;
    }
    if (most == 0.0f)
        scale = 0.0f;
    for (int i = 0; i < size; i++)
        arrives[i] *= scale;
    *scale_of = scale;
    account(apart, arrives, decoded, size, sums);
    return 0;
}

EACH_PROCESSOR int peerd_int8_encode(const float *values, const float *known, int64_t count, float *scales,
                                     int8_t *multiples, float *decoded, double *sums, float smallest, float largest)
{
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int size = smaller(count - start);
        if (SIZED(int8_block, size, values + start, known ? known + start : 0, scales++, multiples + start,
                  decoded ? decoded + start : 0, sums, smallest, largest))
            return 1;
    }
    return 0;
}

INLINE int from_int8(int size, const int8_t *multiples, float scale, float *out)
{
    int beyond = 0;
    for (int i = 0; i < size; i++) {
        const int32_t multiple = multiples[i];
        beyond |= multiple == -128;
        out[i] = (float)multiple * scale;
    }
    return beyond;
}

/* Returns 1 for a multiple of -128; `scales` have been checked. */
EACH_PROCESSOR int peerd_int8_decode(const uint8_t *scales, const int8_t *multiples, int64_t count, float *out)
{
    int beyond = 0;
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int size = smaller(count - start);
        float scale;
        memcpy(&scale, scales, sizeof scale);
        scales += sizeof scale;
        beyond |= SIZED(from_int8, size, multiples + start, scale, out + start);
    }
    return beyond;
}

INLINE int int4_block(int size, const float *values, const float *known, uint16_t *half, uint8_t *packed,
                      float *decoded, double *sums, float largest)
{
    float apart[BLOCK], arrives[BLOCK], multiples[BLOCK];
    subtract(apart, values, known, size);
    uint32_t bits = largest_of(apart, size);
    if (bits > LARGEST_FINITE)
        return 1;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    bits = bfloat16_of(scale / INT4_LEVELS);
    memcpy(&scale, &bits, sizeof scale);
    scale = scale > largest ? largest : scale;
    memcpy(&bits, &scale, sizeof bits);
    *half = (uint16_t)(bits >> 16);
    const float unit = scale > 0.0f ? scale : __builtin_inff(); /* no digits are left */
    for (int i = 0; i < size; i++) { /* where a scale lost digits, a quotient may be beyond 7 */
        multiples[i] = rounded(apart[i] / unit, INT4_LEVELS);
        arrives[i] = (multiples[i] - ROUNDING) * scale;
    }
    memset(multiples + size, 0, sizeof *multiples * (size_t)(BLOCK - size));
    for (int i = 0; 2 * i < size; i++) {
        uint64_t pair;
        memcpy(&pair, multiples + 2 * i, sizeof pair);
        packed[i] = (uint8_t)((pair & 15) | (pair >> 28 & 240));
    }
    account(apart, arrives, decoded, size, sums);
    return 0;
}

EACH_PROCESSOR int peerd_int4_encode(const float *values, const float *known, int64_t count, uint16_t *scales,
                                     uint8_t *packed, float *decoded, double *sums, float largest)
{
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int size = smaller(count - start);
        if (SIZED(int4_block, size, values + start, known ? known + start : 0, scales++, packed,
                  decoded ? decoded + start : 0, sums, largest))
            return 1;
        packed += BLOCK / 2;
    }
    return 0;
}

INLINE int from_int4(int size, const uint8_t *packed, float scale, float *out)
{
    uint8_t nibbles[BLOCK];
    int beyond = 0;
    for (int i = 0; 2 * i < size; i++) {
        const uint16_t pair = (uint16_t)((packed[i] & 15) | packed[i] >> 4 << 8);
        memcpy(nibbles + 2 * i, &pair, sizeof pair);
        beyond |= (packed[i] & 15) == 8 || packed[i] >> 4 == 8;
    }
    for (int i = 0; i < size; i++)
        out[i] = (float)((nibbles[i] ^ 8) - 8) * scale;
    return beyond;
}

/* Returns 1 for a multiple of -8; `scales` have been checked. */
EACH_PROCESSOR int peerd_int4_decode(const uint8_t *scales, const uint8_t *packed, int64_t count, float *out)
{
    int beyond = 0;
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int size = smaller(count - start);
        uint16_t half;
        memcpy(&half, scales, sizeof half); /* bodies lie at any byte */
        scales += sizeof half;
        const uint32_t bits = (uint32_t)half << 16;
        float scale;
        memcpy(&scale, &bits, sizeof scale);
        beyond |= SIZED(from_int4, size, packed, scale, out + start);
        packed += BLOCK / 2;
    }
    return beyond;
}

/* Which of a block's differences are `threshold` or more, as bits of magnitudes; returns 1 where one is not finite. */
INLINE int compare(int size, const float *values, const float *known, uint32_t threshold, float *apart,
                   uint8_t *enough)
{
    subtract(apart, values, known, size);
    for (int i = 0; i < size; i++) {
        uint32_t bits;
        memcpy(&bits, apart + i, sizeof bits);
        enough[i] = (bits & MAGNITUDE) >= threshold;
    }
    memset(enough + size, 0, (size_t)(BLOCK - size));
    return largest_of(apart, size) > LARGEST_FINITE;
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
        const int size = smaller(count - start);
        if (SIZED(compare, size, values + start, known ? known + start : 0, threshold, apart, enough))
            return -1;
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

INLINE double move(int size, float *mine, const float *outgoing, float *theirs, float *next)
{
    for (int i = 0; i < size; i++) {
        const float moved = mine[i] + outgoing[i], came = next[i];
        mine[i] = moved;
        theirs[i] = came;
        next[i] = came - moved;
    }
    return squares_of(next, size);
}

/* mine += outgoing; theirs = next; next -= mine. `squares` gets those of `next` as it is then, as peerd_squares. */
EACH_PROCESSOR void peerd_move_references(float *mine, const float *outgoing, float *theirs, float *next,
                                          const int64_t *stops, int64_t ranges, double *squares)
{
    int64_t start = 0;
    for (int64_t range = 0; range < ranges; range++) {
        double total = 0.0;
        for (; start < stops[range]; start += BLOCK) {
            const int size = smaller(stops[range] - start);
            total += SIZED(move, size, mine + start, outgoing + start, theirs + start, next + start);
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

INLINE void mean_block(int size, float *gradient, const float *summed, float members, double *totals)
{
    float mean[BLOCK], apart[BLOCK];
    for (int i = 0; i < size; i++)
        mean[i] = summed[i] / members;
    for (int i = 0; i < size; i++)
        apart[i] = gradient[i] - mean[i];
    memcpy(gradient, mean, size * sizeof *mean);
    totals[0] += squares_of(mean, size);
    totals[1] += squares_of(apart, size);
}

/* mean = summed / members, into gradient. Adds to totals: the squares of the mean, and of what gradient was, less it. */
EACH_PROCESSOR void peerd_mean(float *gradient, const float *summed, int64_t count, float members, double *totals)
{
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int size = smaller(count - start);
        SIZED(mean_block, size, gradient + start, summed + start, members, totals);
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
INLINE uint8_t pack_block(int size, const float *values, int16_t *multiples)
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

INLINE void unpack_block(int size, const int16_t *multiples, uint8_t exponent, float *values)
{
    const float unit = power_of_two(exponent - 14u);
    for (int i = 0; i < size; i++)
        values[i] = (float)multiples[i] * unit;
}

EACH_PROCESSOR void peerd_blocks_pack(const float *values, int64_t count, int16_t *multiples, uint8_t *exponents)
{
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int size = smaller(count - start);
        *exponents++ = SIZED(pack_block, size, values + start, multiples + start);
    }
}

EACH_PROCESSOR void peerd_blocks_unpack(const int16_t *multiples, const uint8_t *exponents, int64_t count, float *out)
{
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int size = smaller(count - start);
        SIZED(unpack_block, size, multiples + start, *exponents++, out + start);
    }
}

INLINE void move_block(int size, int16_t *mine, uint8_t *of_mine, const float *outgoing, int16_t *theirs,
                       uint8_t *of_theirs, float *next)
{
    float moved[BLOCK];
    unpack_block(size, mine, *of_mine, moved);
    for (int i = 0; i < size; i++)
        moved[i] += outgoing[i];
    *of_mine = pack_block(size, moved, mine);
    *of_theirs = pack_block(size, next, theirs);
    for (int i = 0; i < size; i++)
        next[i] -= moved[i];
}

/* peerd_move_references of two references in such blocks, without the squares. */
EACH_PROCESSOR void peerd_blocks_move(int16_t *mine, uint8_t *of_mine, const float *outgoing, int16_t *theirs,
                                      uint8_t *of_theirs, float *next, int64_t count)
{
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int size = smaller(count - start);
        SIZED(move_block, size, mine + start, of_mine++, outgoing + start, theirs + start, of_theirs++, next + start);
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
