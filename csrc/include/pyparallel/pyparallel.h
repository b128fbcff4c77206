/* pyparallel: communication between the processes of one host over shared memory.
 *
 * This is the whole public interface of libpyparallel, for any language that can call C. It is
 * plain C99; every function may be called from C++ too.
 *
 * A group is made of `size` ranks (processes, or threads). One of them makes an id, carries it to
 * the others by any means (a file, a socket, MPI, the environment), and all of them join:
 *
 *     pyparallel_unique_id_t id;
 *     pyparallel_comm_t comm;
 *     if (rank == 0) pyparallel_get_unique_id(&id);
 *     ... hand `id` to the other ranks ...
 *     pyparallel_join(&id, rank, size, "world", 30000, &comm);
 *     pyparallel_all_reduce(comm, x, x, n, PYPARALLEL_FLOAT32, PYPARALLEL_SUM, 1.0,
 *                           PYPARALLEL_DEFAULT_TIMEOUT);
 *     pyparallel_destroy(&comm);
 *
 * Errors. Every function that can fail returns a status; PYPARALLEL_OK is 0. The text of the last
 * failure on the calling thread is in pyparallel_last_error(). A failed call changed no output
 * handle. Collectives that fail on one rank fail on all:
 *   - arguments that cannot work give PYPARALLEL_INVALID_ARGUMENT on the rank that passed them and
 *     PYPARALLEL_MISMATCH, with its reason, on the others; the group stays usable;
 *   - arguments that differ between ranks give PYPARALLEL_MISMATCH on every rank, and the group
 *     stays usable;
 *   - a timeout, a lost peer or an abort breaks the group: every rank's current and later calls
 *     return the first reason.
 *
 * Threads. Calls on one communicator from several threads are safe and run one at a time (sends and
 * receives concurrently). Different communicators are independent. A handle must not be destroyed
 * while a call on it runs. After fork() the child must not use the parent's communicators: its
 * calls return PYPARALLEL_CLOSED.
 *
 * Collectives. Every rank of the group calls every collective, in the same order. Counts are
 * numbers of elements; zero is allowed everywhere. `in` and `out` are the same array (in place) or
 * do not overlap. Results have the same bits on every rank and in every run: values are combined in
 * rank order; 16-bit floats accumulate in 32 bits and are rounded once.
 *
 * Timeouts are in milliseconds; PYPARALLEL_DEFAULT_TIMEOUT takes the communicator's own. */
#ifndef PYPARALLEL_PYPARALLEL_H_
#define PYPARALLEL_PYPARALLEL_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define PYPARALLEL_API __attribute__((visibility("default")))
#else
#define PYPARALLEL_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The interface of this header. It grows when functions or values are added; none is ever changed
 * or taken away under the same major version. */
#define PYPARALLEL_ABI_MAJOR 1
#define PYPARALLEL_ABI_MINOR 0

/* --- values ------------------------------------------------------------------------------------
 */

typedef int32_t pyparallel_status_t;
enum {
  PYPARALLEL_OK = 0,
  PYPARALLEL_INVALID_ARGUMENT = 1, /* found before any communication */
  PYPARALLEL_MISMATCH = 2,         /* the ranks called different things: every rank gets this */
  PYPARALLEL_TIMEOUT = 3,      /* a deadline passed; the text names the ranks that have not come */
  PYPARALLEL_PEER_LOST = 4,    /* a rank's process died, or it closed its communicator */
  PYPARALLEL_ABORTED = 5,      /* abort was called, or an earlier failure broke the group */
  PYPARALLEL_CLOSED = 6,       /* used after close, or in a forked child */
  PYPARALLEL_NO_MEMORY = 7,    /* shared memory: the text has needed and free bytes */
  PYPARALLEL_SYSTEM = 8,       /* an operating system call failed */
  PYPARALLEL_NCCL = 9,         /* not given by the functions of this header */
  PYPARALLEL_CUDA = 10,        /* not given by the functions of this header */
  PYPARALLEL_UNSUPPORTED = 11, /* this build or machine cannot; the text says what is needed */
  PYPARALLEL_INTERRUPTED = 12, /* a signal handler's host asked the wait to end */
  PYPARALLEL_INTERNAL = 13
};

typedef int32_t pyparallel_dtype_t;
enum {
  PYPARALLEL_FLOAT64 = 0,
  PYPARALLEL_FLOAT32 = 1,
  PYPARALLEL_FLOAT16 = 2,  /* IEEE binary16 */
  PYPARALLEL_BFLOAT16 = 3, /* upper half of a float32 */
  PYPARALLEL_INT8 = 4,
  PYPARALLEL_INT16 = 5,
  PYPARALLEL_INT32 = 6,
  PYPARALLEL_INT64 = 7,
  PYPARALLEL_UINT8 = 8,
  PYPARALLEL_BOOL = 9 /* one byte, 0 or 1 */
};

/* Integers wrap (int8: 120 + 100 is -36). AVG of integers truncates towards zero, of the wrapped
 * sum. Booleans: SUM and MAX are "or", PRODUCT and MIN are "and"; AVG is refused. MIN and MAX
 * propagate NaN. PREMUL_SUM (floats only) multiplies each rank's input by that rank's `factor`
 * before the sum; other operations ignore `factor`. BAND, BOR and BXOR are for integers and
 * booleans. */
typedef int32_t pyparallel_op_t;
enum {
  PYPARALLEL_SUM = 0,
  PYPARALLEL_AVG = 1,
  PYPARALLEL_MIN = 2,
  PYPARALLEL_MAX = 3,
  PYPARALLEL_PRODUCT = 4,
  PYPARALLEL_PREMUL_SUM = 5,
  PYPARALLEL_BAND = 6,
  PYPARALLEL_BOR = 7,
  PYPARALLEL_BXOR = 8
};

#define PYPARALLEL_DEFAULT_TIMEOUT ((int64_t)-1)
#define PYPARALLEL_ANY_SOURCE ((int32_t)-1)
#define PYPARALLEL_NO_COLOR ((int32_t)-1)

/* What ranks need to find each other. Secret to them: whoever has it can join. Serves one group. */
#define PYPARALLEL_UNIQUE_ID_BYTES 128
typedef struct pyparallel_unique_id {
  uint8_t bytes[PYPARALLEL_UNIQUE_ID_BYTES];
} pyparallel_unique_id_t;

/* One rank's seat in one group. */
typedef struct pyparallel_comm* pyparallel_comm_t;

/* A started send or receive. */
typedef struct pyparallel_request* pyparallel_request_t;

/* --- the library -------------------------------------------------------------------------------
 */

/* The library's release, such as "1.2.3". */
PYPARALLEL_API const char* pyparallel_version(void);

/* The interface that the loaded library implements: usable when the major numbers are equal and the
 * library's minor number is at least the header's. */
PYPARALLEL_API void pyparallel_abi_version(int32_t* major, int32_t* minor);

/* What the last failed call on this thread has to say; "" when none has failed. Valid until the
 * next failure on this thread. */
PYPARALLEL_API const char* pyparallel_last_error(void);

/* A name for a status ("timeout"); never NULL. */
PYPARALLEL_API const char* pyparallel_status_name(pyparallel_status_t status);

/* Bytes of one element; 0 for an unknown type. */
PYPARALLEL_API size_t pyparallel_dtype_size(pyparallel_dtype_t dtype);

/* --- life of a communicator --------------------------------------------------------------------
 */

/* Fills `id` with a fresh random id. */
PYPARALLEL_API pyparallel_status_t pyparallel_get_unique_id(pyparallel_unique_id_t* id);

/* Collective over the ranks that hold `id`: returns when all `size` have come, or names the absent
 * ones at the deadline. `name` (may be NULL) appears in messages. `timeout_ms` also becomes the
 * default of later calls; PYPARALLEL_DEFAULT_TIMEOUT here means 30 seconds. */
PYPARALLEL_API pyparallel_status_t pyparallel_join(const pyparallel_unique_id_t* id, int32_t rank,
                                                   int32_t size, const char* name,
                                                   int64_t timeout_ms, pyparallel_comm_t* comm);

/* Collective. Ranks of one color (not negative) form a new group, ordered by key, then by rank. A
 * rank that passes PYPARALLEL_NO_COLOR takes part and gets NULL. */
PYPARALLEL_API pyparallel_status_t pyparallel_split(pyparallel_comm_t comm, int32_t color,
                                                    int32_t key, const char* name,
                                                    pyparallel_comm_t* part);

/* Wakes every waiter of the group, on every rank; they return PYPARALLEL_ABORTED with `why`. Never
 * waits. */
PYPARALLEL_API pyparallel_status_t pyparallel_abort(pyparallel_comm_t comm, const char* why);

/* Leaves the group; the handle stays valid and every later call returns PYPARALLEL_CLOSED. Never
 * waits; may be called twice. Ranks that wait for this one return PYPARALLEL_PEER_LOST. */
PYPARALLEL_API pyparallel_status_t pyparallel_close(pyparallel_comm_t comm);

/* Closes and frees; sets *comm to NULL. NULL is allowed. Never waits. */
PYPARALLEL_API pyparallel_status_t pyparallel_destroy(pyparallel_comm_t* comm);

PYPARALLEL_API pyparallel_status_t pyparallel_rank(pyparallel_comm_t comm, int32_t* rank);
PYPARALLEL_API pyparallel_status_t pyparallel_size(pyparallel_comm_t comm, int32_t* size);
/* Number of collectives that this rank has started: the #n of messages. */
PYPARALLEL_API pyparallel_status_t pyparallel_sequence(pyparallel_comm_t comm, uint64_t* sequence);
/* Process id of a rank; 0 when it lives in another pid namespace. */
PYPARALLEL_API pyparallel_status_t pyparallel_pid(pyparallel_comm_t comm, int32_t rank,
                                                  int32_t* pid);
PYPARALLEL_API pyparallel_status_t pyparallel_get_timeout(pyparallel_comm_t comm,
                                                          int64_t* timeout_ms);
PYPARALLEL_API pyparallel_status_t pyparallel_set_timeout(pyparallel_comm_t comm,
                                                          int64_t timeout_ms);
/* Writes why the group is unusable, or "" while it is usable: at most `bytes` including the final
 * 0. `needed` (may be NULL) receives the size of the whole text. */
PYPARALLEL_API pyparallel_status_t pyparallel_failure(pyparallel_comm_t comm, char* text,
                                                      size_t bytes, size_t* needed);

/* --- collectives --------------------------------------------------------------------------------
 */

/* out[i] = op over the ranks of in[i], on every rank. */
PYPARALLEL_API pyparallel_status_t pyparallel_all_reduce(pyparallel_comm_t comm, const void* in,
                                                         void* out, uint64_t count,
                                                         pyparallel_dtype_t dtype,
                                                         pyparallel_op_t op, double factor,
                                                         int64_t timeout_ms);

/* The same on the root only; `out` is ignored elsewhere. */
PYPARALLEL_API pyparallel_status_t pyparallel_reduce(pyparallel_comm_t comm, const void* in,
                                                     void* out, uint64_t count,
                                                     pyparallel_dtype_t dtype, pyparallel_op_t op,
                                                     double factor, int32_t root,
                                                     int64_t timeout_ms);

/* `in` holds size * count elements, block r is for rank r. `out`: my block reduced over the ranks.
 */
PYPARALLEL_API pyparallel_status_t pyparallel_reduce_scatter(pyparallel_comm_t comm, const void* in,
                                                             void* out, uint64_t count,
                                                             pyparallel_dtype_t dtype,
                                                             pyparallel_op_t op, double factor,
                                                             int64_t timeout_ms);

/* Uneven: in[r] points to counts[r] elements for rank r; `counts` is the same on every rank. */
PYPARALLEL_API pyparallel_status_t pyparallel_reduce_scatter_v(
    pyparallel_comm_t comm, const void* const* in, const uint64_t* counts, void* out,
    pyparallel_dtype_t dtype, pyparallel_op_t op, double factor, int64_t timeout_ms);

/* `out` receives size * count elements: the `in` of rank 0, 1, ... */
PYPARALLEL_API pyparallel_status_t pyparallel_all_gather(pyparallel_comm_t comm, const void* in,
                                                         void* out, uint64_t count,
                                                         pyparallel_dtype_t dtype,
                                                         int64_t timeout_ms);

/* Uneven: out[r] receives the counts[r] elements of rank r; `counts` is the same on every rank. */
PYPARALLEL_API pyparallel_status_t pyparallel_all_gather_v(pyparallel_comm_t comm, const void* in,
                                                           void* const* out, const uint64_t* counts,
                                                           pyparallel_dtype_t dtype,
                                                           int64_t timeout_ms);

/* Block r of `in` (count elements) goes to rank r; block r of `out` comes from rank r. */
PYPARALLEL_API pyparallel_status_t pyparallel_all_to_all(pyparallel_comm_t comm, const void* in,
                                                         void* out, uint64_t count,
                                                         pyparallel_dtype_t dtype,
                                                         int64_t timeout_ms);

/* Uneven: in[r] points to in_counts[r] elements for rank r, out[r] to room for out_counts[r] from
 * it. My in_counts[r] must be rank r's out_counts[me]. */
PYPARALLEL_API pyparallel_status_t pyparallel_all_to_all_v(
    pyparallel_comm_t comm, const void* const* in, const uint64_t* in_counts, void* const* out,
    const uint64_t* out_counts, pyparallel_dtype_t dtype, int64_t timeout_ms);

/* `data` of the root goes to the `data` of every other rank. */
PYPARALLEL_API pyparallel_status_t pyparallel_broadcast(pyparallel_comm_t comm, void* data,
                                                        uint64_t count, pyparallel_dtype_t dtype,
                                                        int32_t root, int64_t timeout_ms);

/* Block r of the root's `in` (count elements each) goes to rank r's `out`; `in` is ignored
 * elsewhere. */
PYPARALLEL_API pyparallel_status_t pyparallel_scatter(pyparallel_comm_t comm, const void* in,
                                                      void* out, uint64_t count,
                                                      pyparallel_dtype_t dtype, int32_t root,
                                                      int64_t timeout_ms);

/* Uneven: the root's in[r] with in_counts[r] elements goes to rank r, whose out_count must be that.
 * `in` and `in_counts` are ignored elsewhere. */
PYPARALLEL_API pyparallel_status_t pyparallel_scatter_v(
    pyparallel_comm_t comm, const void* const* in, const uint64_t* in_counts, void* out,
    uint64_t out_count, pyparallel_dtype_t dtype, int32_t root, int64_t timeout_ms);

/* Block r of the root's `out` (count elements each) receives rank r's `in`; `out` is ignored
 * elsewhere. */
PYPARALLEL_API pyparallel_status_t pyparallel_gather(pyparallel_comm_t comm, const void* in,
                                                     void* out, uint64_t count,
                                                     pyparallel_dtype_t dtype, int32_t root,
                                                     int64_t timeout_ms);

/* Uneven: the root's out[r] receives out_counts[r] elements of rank r, whose in_count must be that.
 * `out` and `out_counts` are ignored elsewhere. */
PYPARALLEL_API pyparallel_status_t pyparallel_gather_v(pyparallel_comm_t comm, const void* in,
                                                       uint64_t in_count, void* const* out,
                                                       const uint64_t* out_counts,
                                                       pyparallel_dtype_t dtype, int32_t root,
                                                       int64_t timeout_ms);

/* Returns when every rank has called it. */
PYPARALLEL_API pyparallel_status_t pyparallel_barrier(pyparallel_comm_t comm, int64_t timeout_ms);

/* For a caller whose own checks failed: takes this rank's place in the next collective without
 * taking part. The other ranks return PYPARALLEL_MISMATCH with `why`; this one returns at once. */
PYPARALLEL_API pyparallel_status_t pyparallel_refuse(pyparallel_comm_t comm, const char* op,
                                                     const char* why);

/* --- point to point -----------------------------------------------------------------------------
 * Messages are matched by (source, tag), oldest first; count and dtype must be the sender's. A send
 * is buffered up to what fits and never waits for the receiver's own sends, so two ranks may both
 * send first. Not ordered with collectives. */

PYPARALLEL_API pyparallel_status_t pyparallel_send(pyparallel_comm_t comm, const void* data,
                                                   uint64_t count, pyparallel_dtype_t dtype,
                                                   int32_t destination, int64_t tag,
                                                   int64_t timeout_ms);

/* `source` may be PYPARALLEL_ANY_SOURCE; `from` (may be NULL) receives the sender's rank. */
PYPARALLEL_API pyparallel_status_t pyparallel_recv(pyparallel_comm_t comm, void* data,
                                                   uint64_t count, pyparallel_dtype_t dtype,
                                                   int32_t source, int64_t tag, int64_t timeout_ms,
                                                   int32_t* from);

/* Start and return. The array belongs to the call until pyparallel_wait() has returned, or
 * pyparallel_test() has said that the call is over; free the request afterwards. */
PYPARALLEL_API pyparallel_status_t pyparallel_isend(pyparallel_comm_t comm, const void* data,
                                                    uint64_t count, pyparallel_dtype_t dtype,
                                                    int32_t destination, int64_t tag,
                                                    pyparallel_request_t* request);
PYPARALLEL_API pyparallel_status_t pyparallel_irecv(pyparallel_comm_t comm, void* data,
                                                    uint64_t count, pyparallel_dtype_t dtype,
                                                    int32_t source, int64_t tag,
                                                    pyparallel_request_t* request);

/* Returns the call's own status when it is over. The deadline is that of the call: when it passes,
 * the group is broken (PYPARALLEL_TIMEOUT). `from` (may be NULL): sender of a receive. */
PYPARALLEL_API pyparallel_status_t pyparallel_wait(pyparallel_request_t request, int64_t timeout_ms,
                                                   int32_t* from);
/* *done = 1 when the call is over, well or badly. */
PYPARALLEL_API pyparallel_status_t pyparallel_test(pyparallel_request_t request, int32_t* done);
/* Sets *request to NULL. NULL is allowed. Does not end an unfinished call, and never waits. */
PYPARALLEL_API pyparallel_status_t pyparallel_request_free(pyparallel_request_t* request);

/* --- symmetric memory ---------------------------------------------------------------------------
 * The same allocation on every rank, each addressable by all: collectives on it need no staging,
 * and ranks may read and write each other's bytes directly, ordered by barriers and signals.
 * create, allocate, release and barrier are collective over the group; the rest is local. */

/* One rank's seat in one symmetric memory. */
typedef struct pyparallel_symmetric* pyparallel_symmetric_t;

/* `bytes` on each rank (rounded up to pages): host memory for device -1, else that CUDA device's.
 * `name` (may be NULL) appears in messages. The communicator stays the caller's. */
PYPARALLEL_API pyparallel_status_t pyparallel_symmetric_create(pyparallel_comm_t comm,
                                                               uint64_t bytes, int32_t device,
                                                               const char* name, int64_t timeout_ms,
                                                               pyparallel_symmetric_t* memory);

/* Fresh bytes (not cleared) at the same offset on every rank; alignment is a power of two. */
PYPARALLEL_API pyparallel_status_t pyparallel_symmetric_allocate(pyparallel_symmetric_t memory,
                                                                 uint64_t bytes, uint64_t alignment,
                                                                 int64_t timeout_ms,
                                                                 uint64_t* offset);

/* Gives an allocation back; returns when all ranks have called. */
PYPARALLEL_API pyparallel_status_t pyparallel_symmetric_release(pyparallel_symmetric_t memory,
                                                                uint64_t offset,
                                                                int64_t timeout_ms);

/* Where a rank's memory begins, as an address of this process; valid until destroy. */
PYPARALLEL_API pyparallel_status_t pyparallel_symmetric_data(pyparallel_symmetric_t memory,
                                                             int32_t rank, void** data);

/* Returns when every rank has called it; writes before it are seen after it. */
PYPARALLEL_API pyparallel_status_t pyparallel_symmetric_barrier(pyparallel_symmetric_t memory,
                                                                int64_t timeout_ms);

/* Raises this rank's counter of `channel` on `peer`: writes before it are seen by the wait that it
 * matches. The n-th wait for (source, channel) returns after the n-th put. A put never waits. */
PYPARALLEL_API pyparallel_status_t pyparallel_symmetric_put_signal(pyparallel_symmetric_t memory,
                                                                   int32_t peer, int32_t channel);
PYPARALLEL_API pyparallel_status_t pyparallel_symmetric_wait_signal(pyparallel_symmetric_t memory,
                                                                    int32_t source, int32_t channel,
                                                                    int64_t timeout_ms);

/* Leaves and frees; sets *memory to NULL. NULL is allowed. Never waits for another rank. */
PYPARALLEL_API pyparallel_status_t pyparallel_symmetric_destroy(pyparallel_symmetric_t* memory);

#ifdef __cplusplus
}
#endif

#endif /* PYPARALLEL_PYPARALLEL_H_ */
