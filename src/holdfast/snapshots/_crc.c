/* The CRC of zlib, four times as fast as zlib's own where that has no instructions for it.
 *
 * Carry-less multiplications fold 64 bytes at a time into 64 others with the same remainder, and in the end 16 bytes into
 * the remainder itself: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction",
 * Intel, 2009, for the polynomial 0x04C11DB7 with its bits in reversed order. On processors without these instructions
 * the module cannot be imported, and zlib is used (memory_folder.py).
 *
 * Knows bytes only. Holds no lock of the interpreter's while it works.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>

#ifdef __x86_64__
#include <immintrin.h>

#define POLYNOMIAL 0xEDB88320u
#define FOLDED_BYTES 64
#define BLOCK_BYTES 16
#define INSTRUCTIONS __attribute__((target("pclmul,sse4.1")))

static int
is_able(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

static uint32_t
by_bits(uint32_t crc, const uint8_t *data, size_t size)
{
    for (; size > 0; data++, size--) {
        crc ^= *data;
        for (int bit = 0; bit < 8; bit++) {
            crc = crc >> 1 ^ (POLYNOMIAL & -(crc & 1));
        }
    }
    return crc;
}

INSTRUCTIONS static inline __m128i
load(const uint8_t *data)
{
    return _mm_loadu_si128((const __m128i *)data);
}

/* `block`, moved on by as many bits as `by` stands for. */
INSTRUCTIONS static inline __m128i
folded(__m128i block, __m128i by, __m128i onto)
{
    __m128i low = _mm_clmulepi64_si128(block, by, 0x00), high = _mm_clmulepi64_si128(block, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), onto);
}

/* FOLDED_BYTES at least, and whole blocks. */
INSTRUCTIONS static uint32_t
by_blocks(uint32_t crc, const uint8_t *data, size_t size)
{
    const __m128i by_64_bytes = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i by_16_bytes = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i by_8_bytes = _mm_set_epi64x(0, 0x0163cd6124);
    const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641); /* the polynomial, and its reciprocal */
    const __m128i low_words = _mm_setr_epi32(-1, 0, -1, 0);
    __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128((int)crc));
    __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48), low;
    for (data += FOLDED_BYTES, size -= FOLDED_BYTES; size >= FOLDED_BYTES; data += FOLDED_BYTES, size -= FOLDED_BYTES) {
        a = folded(a, by_64_bytes, load(data)), b = folded(b, by_64_bytes, load(data + 16));
        c = folded(c, by_64_bytes, load(data + 32)), d = folded(d, by_64_bytes, load(data + 48));
    }
    a = folded(folded(folded(a, by_16_bytes, b), by_16_bytes, c), by_16_bytes, d);
    for (; size >= BLOCK_BYTES; data += BLOCK_BYTES, size -= BLOCK_BYTES) {
        a = folded(a, by_16_bytes, load(data));
    }
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_16_bytes, 0x10)); /* 128 bits to 96 */
    low = _mm_and_si128(a, low_words);
    a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(low, by_8_bytes, 0x00)); /* 96 bits to 64 */
    low = _mm_clmulepi64_si128(_mm_and_si128(a, low_words), barrett, 0x10);
    low = _mm_clmulepi64_si128(_mm_and_si128(low, low_words), barrett, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(a, low), 1);
}

static uint32_t
crc_of(const uint8_t *data, size_t size)
{
    uint32_t crc = ~0u;
    size_t whole = size >= FOLDED_BYTES ? size - size % BLOCK_BYTES : 0;
    if (whole > 0) {
        crc = by_blocks(crc, data, whole);
    }
    return ~by_bits(crc, data + whole, size - whole);
}
#else
static int
is_able(void)
{
    return 0;
}

static uint32_t
crc_of(const uint8_t *data, size_t size)
{
    (void)data, (void)size;
    return 0;
}
#endif

PyDoc_STRVAR(crc32_doc, "crc32(data)\n--\n\nzlib.crc32 of these bytes, without the interpreter's lock. TypeError, BufferError.");

static PyObject *
crc_crc32(PyObject *module, PyObject *argument)
{
    Py_buffer data;
    uint32_t crc;
    (void)module;
    if (PyObject_GetBuffer(argument, &data, PyBUF_SIMPLE) != 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    crc = crc_of(data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static int
begin(PyObject *module)
{
    (void)module;
    if (!is_able()) {
        PyErr_SetString(PyExc_ImportError, "this processor has no instructions for it");
        return -1;
    }
    return 0;
}

static PyMethodDef methods[] = {{"crc32", crc_crc32, METH_O, crc32_doc}, {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, begin}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_crc", "A fast CRC; see _crc.c.", 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit__crc(void)
{
    return PyModuleDef_Init(&definition);
}
