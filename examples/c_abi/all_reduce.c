/* Two processes add their vectors, in C.
 *
 *     ./all_reduce           starts itself twice, as rank 0 and rank 1
 *     ./all_reduce RANK ID   is one rank; ID is the group's id in hexadecimal
 *
 * A real program carries the id by whatever it has: MPI, a socket, a file, its scheduler. */
#include <pyparallel/pyparallel.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WORLD = 2, COUNT = 1000 };

/* Every call returns a status; the text of a failure is kept per thread. */
#define CHECK(call)                                                                         \
  do {                                                                                      \
    const pyparallel_status_t status = (call);                                              \
    if (status != PYPARALLEL_OK) {                                                          \
      fprintf(stderr, "%s: %s\n", pyparallel_status_name(status), pyparallel_last_error()); \
      exit(1);                                                                              \
    }                                                                                       \
  } while (0)

static int run_rank(int rank, const char* hex) {
  pyparallel_unique_id_t id;
  if (strlen(hex) != 2 * sizeof id.bytes) {
    fprintf(stderr, "expected an id of %zu hexadecimal digits\n", 2 * sizeof id.bytes);
    return 2;
  }
  for (size_t i = 0; i < sizeof id.bytes; ++i) {
    unsigned byte = 0;
    if (sscanf(hex + 2 * i, "%2x", &byte) != 1) return 2;
    id.bytes[i] = (uint8_t)byte;
  }

  pyparallel_comm_t comm = NULL;
  CHECK(pyparallel_join(&id, rank, WORLD, "example", 30000, &comm));

  float x[COUNT];
  for (int i = 0; i < COUNT; ++i) x[i] = (float)(i + 1) * (float)(rank + 1);
  CHECK(pyparallel_all_reduce(comm, x, x, COUNT, PYPARALLEL_FLOAT32, PYPARALLEL_SUM, 1.0,
                              PYPARALLEL_DEFAULT_TIMEOUT));

  int wrong = 0;
  for (int i = 0; i < COUNT; ++i) wrong += x[i] != 3.0f * (float)(i + 1); /* 1 + 2 = 3 times */
  CHECK(pyparallel_barrier(comm, PYPARALLEL_DEFAULT_TIMEOUT));
  CHECK(pyparallel_destroy(&comm));
  printf("rank %d of %d: %d of %d sums are right (pyparallel %s)\n", rank, WORLD, COUNT - wrong,
         COUNT, pyparallel_version());
  return wrong != 0;
}

static int start_ranks(const char* program) {
  pyparallel_unique_id_t id;
  char hex[2 * sizeof id.bytes + 1];
  CHECK(pyparallel_get_unique_id(&id));
  for (size_t i = 0; i < sizeof id.bytes; ++i) sprintf(hex + 2 * i, "%02x", id.bytes[i]);

  int failed = 0;
  for (int rank = 0; rank < WORLD; ++rank) {
    char number[12];
    snprintf(number, sizeof number, "%d", rank);
    const pid_t child = fork();
    if (child == 0) {
      execl(program, program, number, hex, (char*)NULL);
      _exit(127);
    }
    failed |= child < 0;
  }
  for (int status; wait(&status) > 0;) failed |= !WIFEXITED(status) || WEXITSTATUS(status) != 0;
  return failed;
}

int main(int argc, char** argv) {
  if (argc == 1) return start_ranks("/proc/self/exe");
  if (argc == 3) return run_rank(atoi(argv[1]), argv[2]);
  fprintf(stderr, "usage: %s [RANK ID]\n", argv[0]);
  return 2;
}
