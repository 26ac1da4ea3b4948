// An NCCL between the stand-in's GPUs (runtime.h), for ranks that are threads or processes: messages are files in a
// directory that the id names. A transfer is a kernel that waits for its peers until the communicator is aborted. As
// strict as the real one: two ranks on one GPU are refused, an abort restores the current GPU, and no call works after
// the exit handlers. Stricter than the real one, it accepts device memory only.
//
// STAND_IN_NCCL_STUCK: ncclCommAbort ends the kernels and never returns.
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

// Symbols of the program that loaded this library.
namespace reshard::stand_in {
bool is_device_memory(const void* from);
}

struct ncclComm {};

namespace {

std::atomic<bool> ended{false};

void enter() {
  static const bool registered = std::atexit([] { ended = true; }) == 0;
  static_cast<void>(registered);
  if (!ended) return;
  std::fprintf(stderr, "NCCL is called after its exit handlers\n");
  std::_Exit(86);
}

struct Comm {
  std::string directory;
  int rank = 0, size = 0, gpu = 0;
  std::atomic<bool> aborted{false};
  std::atomic<ncclResult_t> state{ncclInProgress};
  std::map<int, int> sent, received;  // messages so far

  std::string message(int from, int to, int n) const {
    return directory + "/" + std::to_string(from) + "-" + std::to_string(to) + "-" + std::to_string(n);
  }
  std::string mark(const char* what, int of) const { return directory + "/" + what + "." + std::to_string(of); }
  void put(const std::string& path, const void* bytes, std::size_t n) const {
    const std::string part = path + ".part";
    std::ofstream(part, std::ios::binary).write(static_cast<const char*>(bytes), static_cast<std::streamsize>(n));
    static_cast<void>(std::rename(part.c_str(), path.c_str()));
  }
  // Returns false if the communicator is aborted first.
  bool await(const std::string& path) const {
    for (; ::access(path.c_str(), F_OK) != 0; std::this_thread::sleep_for(std::chrono::microseconds(200)))
      if (aborted) return false;
    return true;
  }
};
using CommPtr = std::shared_ptr<Comm>;

struct Handle : ncclComm {
  CommPtr comm;
};
CommPtr& of(ncclComm_t comm) { return static_cast<Handle*>(comm)->comm; }

struct Operation {
  bool send = false;
  void* bytes = nullptr;
  std::size_t n = 0;
  int peer = 0, number = 0;
};
struct Group {
  CommPtr comm;
  cudaStream_t stream = nullptr;
  std::vector<Operation> operations;
};
thread_local Group group;

ncclResult_t add(bool send, void* bytes, std::size_t n, int peer, ncclComm_t handle, cudaStream_t stream) {
  if (n > 0 && !reshard::stand_in::is_device_memory(bytes)) return ncclInvalidArgument;
  group.comm = of(handle);
  group.stream = stream;
  const int number = send ? group.comm->sent[peer]++ : group.comm->received[peer]++;
  group.operations.push_back({send, bytes, n, peer, number});
  return ncclSuccess;
}

void CUDART_CB kernel(void* data) {
  const std::unique_ptr<Group> g(static_cast<Group*>(data));
  const Comm& comm = *g->comm;
  for (const Operation& o : g->operations)
    if (o.send) comm.put(comm.message(comm.rank, o.peer, o.number), o.bytes, o.n);
  for (const Operation& o : g->operations) {
    if (o.send) continue;
    const std::string path = comm.message(o.peer, comm.rank, o.number);
    if (!comm.await(path)) return;
    std::ifstream(path, std::ios::binary).read(static_cast<char*>(o.bytes), static_cast<std::streamsize>(o.n));
    ::unlink(path.c_str());
  }
}

// Waits for all ranks in a thread, as a non-blocking communicator does.
void meet(const CommPtr& comm, const char* what) {
  comm->state = ncclInProgress;
  std::thread([comm, what] {
    std::map<std::string, int> gpus;
    for (int r = 0; r < comm->size; ++r) {
      if (!comm->await(comm->mark(what, r))) return;
      std::string gpu;
      std::getline(std::ifstream(comm->mark(what, r)), gpu);
      ++gpus[gpu];
    }
    const bool alone = static_cast<int>(gpus.size()) == comm->size;
    comm->state = alone ? ncclSuccess : ncclInvalidUsage;
  }).detach();
}
void arrive(const Comm& comm, const char* what) {
  const std::string text = std::to_string(comm.gpu) + "\n";
  comm.put(comm.mark(what, comm.rank), text.data(), text.size());
}

}  // namespace

extern "C" {

const char* ncclGetErrorString(ncclResult_t code) {
  return code == ncclInvalidUsage ? "invalid usage" : code == ncclInvalidArgument ? "invalid argument" : "an error";
}
ncclResult_t ncclGetVersion(int* version) {
  *version = 22803;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  enter();
  static std::atomic<int> ids{0};
  const char* const temporary = std::getenv("TMPDIR");
  const std::string path = std::string(temporary ? temporary : "/tmp") + "/stand_in_nccl-" +
                           std::to_string(std::random_device()()) + "-" + std::to_string(ids++);
  if (path.size() >= sizeof id->internal) return ncclSystemError;
  std::memset(id, 0, sizeof *id);
  std::memcpy(id->internal, path.data(), path.size());
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  enter();
  if (const char* const bytes = std::getenv("STAND_IN_NCCL_BYTES")) {
    static const std::string taken(static_cast<std::size_t>(std::atoll(bytes)), 'x');
  }
  auto handle = std::make_unique<Handle>();
  handle->comm = std::make_shared<Comm>();
  handle->comm->directory = id.internal;  // made by the first rank, so that an unused id leaves no directory
  if (::mkdir(id.internal, 0700) != 0 && errno != EEXIST) return ncclSystemError;
  handle->comm->rank = rank;
  handle->comm->size = size;
  cudaGetDevice(&handle->comm->gpu);
  arrive(*handle->comm, "here");
  meet(handle->comm, "here");
  *out = handle.release();
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  *state = of(comm)->state;
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  enter();
  arrive(*of(comm), "gone");
  meet(of(comm), "gone");
  return ncclInProgress;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  enter();
  delete static_cast<Handle*>(comm);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  enter();
  of(comm)->aborted = true;
  int before = 0;
  cudaGetDevice(&before);
  if (before != of(comm)->gpu) {
    cudaSetDevice(of(comm)->gpu);
    cudaSetDevice(before);
  }
  while (std::getenv("STAND_IN_NCCL_STUCK")) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  delete static_cast<Handle*>(comm);
  return ncclSuccess;
}
ncclResult_t ncclGroupStart() {
  enter();
  group = {};
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (!group.comm) return ncclSuccess;
  auto all = std::make_unique<Group>(std::move(group));
  const cudaStream_t stream = all->stream;
  group = {};
  return cudaLaunchHostFunc(stream, kernel, all.release()) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclSend(const void* bytes, std::size_t n, ncclDataType_t, int peer, ncclComm_t comm, cudaStream_t s) {
  return add(true, const_cast<void*>(bytes), n, peer, comm, s);
}
ncclResult_t ncclRecv(void* bytes, std::size_t n, ncclDataType_t, int peer, ncclComm_t comm, cudaStream_t s) {
  return add(false, bytes, n, peer, comm, s);
}

}  // extern "C"
