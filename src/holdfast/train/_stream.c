/* Copies of many blocks of memory at once, by threads that synchronize once; the writes bypass the caches. And a search
 * through many numbers at once (see snapshots/not_finite.py).
 *
 * An ordinary store reads the cache line it writes to: a copy moves three bytes over the memory's bus for each byte
 * copied. A streaming store moves two, and leaves the caches to the training. On processors other than x86-64 the blocks
 * are copied by memcpy. See copying.py for who calls this, and for what was measured.
 *
 * Knows addresses and lengths only. Holds no lock of the interpreter's while it copies, and touches none of its objects.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <emmintrin.h>
#endif

#define PIECE_BYTES ((uint64_t)1 << 20) /* a thread that loses its core delays at most this much */
#define STREAMED_BYTES_MIN 4096         /* smaller blocks are likely to be read again soon */
#define LINE_BYTES 64
#define THREADS_MAX 64

typedef struct {
    const uint64_t *targets, *sources, *sizes;
    Py_ssize_t count;
    _Atomic uint64_t next_piece;
} Job;

static void
copy(char *target, const char *source, size_t size)
{
#ifdef __x86_64__
    if (size >= STREAMED_BYTES_MIN) {
        size_t before_line = -(uintptr_t)target % LINE_BYTES;
        memcpy(target, source, before_line);
        target += before_line, source += before_line, size -= before_line;
        for (; size >= LINE_BYTES; target += LINE_BYTES, source += LINE_BYTES, size -= LINE_BYTES) {
            const __m128i *from = (const __m128i *)source;
            __m128i *to = (__m128i *)target;
            __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
            __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
            _mm_stream_si128(to, a), _mm_stream_si128(to + 1, b);
            _mm_stream_si128(to + 2, c), _mm_stream_si128(to + 3, d);
        }
    }
#endif
    memcpy(target, source, size);
}

/* Take pieces until none is left. A counter runs through the pieces of all blocks, so there is no list of them. */
static void *
copy_pieces(void *argument)
{
    Job *job = argument;
    uint64_t mine = atomic_fetch_add(&job->next_piece, 1), begin = 0;
    for (Py_ssize_t block = 0; block < job->count; block++) {
        uint64_t size = job->sizes[block], pieces = (size + PIECE_BYTES - 1) / PIECE_BYTES;
        while (mine < begin + pieces) {
            uint64_t at = (mine - begin) * PIECE_BYTES;
            copy((char *)(uintptr_t)job->targets[block] + at, (const char *)(uintptr_t)job->sources[block] + at,
                 size - at < PIECE_BYTES ? size - at : PIECE_BYTES);
            mine = atomic_fetch_add(&job->next_piece, 1);
        }
        begin += pieces;
    }
#ifdef __x86_64__
    _mm_sfence(); /* what streams is not ordered with the stores that come after it, a commit word's for one */
#else
    atomic_thread_fence(memory_order_release); /* on aarch64 no store is */
#endif
    return NULL;
}

static void
copy_all(Job *job, int threads)
{
    pthread_t others[THREADS_MAX];
    int started = 0;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for threads that know of Python */
    while (started < threads - 1 && pthread_create(&others[started], NULL, copy_pieces, job) == 0) {
        started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    copy_pieces(job);
    while (started > 0) {
        pthread_join(others[--started], NULL);
    }
}

PyDoc_STRVAR(copy_doc,
"copy(targets, sources, sizes_bytes, threads)\n--\n\n"
"Copy blocks of memory: addresses and sizes as buffers of 64-bit numbers, as many of each; complete when it returns.\n\n"
"Blocks must not overlap, and nobody may free them meanwhile. Without the interpreter's lock, by at most `threads`\n"
"threads. Raises ValueError, TypeError, BufferError.");

static PyObject *
stream_copy(PyObject *module, PyObject *arguments)
{
    Py_buffer targets, sources, sizes;
    int threads;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*y*y*i", &targets, &sources, &sizes, &threads)) {
        return NULL;
    }
    int good = targets.len == sources.len && targets.len == sizes.len && targets.len % sizeof(uint64_t) == 0;
    if (good) {
        Job job = {targets.buf, sources.buf, sizes.buf, targets.len / (Py_ssize_t)sizeof(uint64_t), 0};
        Py_BEGIN_ALLOW_THREADS
        copy_all(&job, threads < THREADS_MAX ? threads : THREADS_MAX);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&targets);
    PyBuffer_Release(&sources);
    PyBuffer_Release(&sizes);
    if (!good) {
        PyErr_SetString(PyExc_ValueError, "as many targets, sources and sizes are needed, of 64 bits each");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Four sums at a time, so that no addition has to wait for the one before. */
static int
reaches(const char *data, size_t size, uint64_t mask, uint64_t addend, uint64_t wanted)
{
    uint64_t word[4], any[4] = {0, 0, 0, 0};
    for (; size >= sizeof word; data += sizeof word, size -= sizeof word) {
        memcpy(word, data, sizeof word); /* the numbers may begin anywhere */
        any[0] |= (word[0] & mask) + addend, any[1] |= (word[1] & mask) + addend;
        any[2] |= (word[2] & mask) + addend, any[3] |= (word[3] & mask) + addend;
    }
    memset(word, 0, sizeof word);
    memcpy(word, data, size);
    for (int n = 0; n < 4; n++) {
        any[n] |= (word[n] & mask) + addend;
    }
    return ((any[0] | any[1] | any[2] | any[3]) & wanted) != 0;
}

PyDoc_STRVAR(reaches_doc,
"reaches(data, mask, addend, wanted)\n--\n\n"
"Whether (word & mask) + addend has a bit of `wanted` for some word of 64 bits of these bytes; zeros fill the last one.\n\n"
"Without the interpreter's lock. Raises TypeError, BufferError.");

static PyObject *
stream_reaches(PyObject *module, PyObject *arguments)
{
    Py_buffer data;
    unsigned long long mask, addend, wanted;
    int found;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*KKK", &data, &mask, &addend, &wanted)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    found = reaches(data.buf, (size_t)data.len, mask, addend, wanted);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyBool_FromLong(found);
}

static PyMethodDef methods[] = {
    {"copy", stream_copy, METH_VARARGS, copy_doc},
    {"reaches", stream_reaches, METH_VARARGS, reaches_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_stream", "Copies past the caches; see copying.py.", 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit__stream(void)
{
    return PyModuleDef_Init(&definition);
}
