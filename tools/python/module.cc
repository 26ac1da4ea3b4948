// SPDX-License-Identifier: Apache-2.0
// The extension module reshard._reshard, for use by the Python package in reshard/ only. The public interface is that
// package (docs/python.md).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <condition_variable>
#include <map>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "formats/load.h"
#include "lib/base/catch_exceptions.h"
#include "lib/base/choices.h"
#include "lib/base/memory_limit.h"
#include "lib/base/storage/http.h"
#include "lib/base/text.h"
#include "lib/load/dlpack.h"
#include "lib/transport/job.h"
#include "tools/commands.h"
#include "tools/python/reading.h"

namespace nb = nanobind;

namespace reshard::python {
namespace {

constexpr Index kLong = 32 << 20;  // reads of at least these bytes can be interrupted with Ctrl-C
constexpr auto kLook = std::chrono::milliseconds(50);

// A C++ exception that carries an Error. translate() turns it into an exception of reshard._errors.
struct PythonError {
  Error error;
};

template <class T>
T value_or_raise(Result<T> result) {
  if (!result) throw PythonError{std::move(result).error()};
  if constexpr (!std::is_void_v<T>) return *std::move(result);
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const PythonError& raised) {
    try {
      const nb::object exception =
          nb::module_::import_("reshard._errors")
              .attr("of")(static_cast<int>(raised.error.code()), valid_utf8(raised.error.message()));
      PyErr_SetObject(exception.type().ptr(), exception.ptr());
    } catch (nb::python_error& e) {
      e.restore();
    }
  }
}

// Ends HTTP requests when a Python call is interrupted: also those of other calls, because requests know no calls.
class InterruptedHttp {
 public:
  explicit InterruptedHttp(const std::atomic<bool>& flag) : flag_(flag) { add_http_interrupt(&flag_); }
  ~InterruptedHttp() { remove_http_interrupt(&flag_); }
  InterruptedHttp(const InterruptedHttp&) = delete;
  InterruptedHttp& operator=(const InterruptedHttp&) = delete;

 private:
  const std::atomic<bool>& flag_;
};

// Runs the work on a separate thread, with the GIL released, while this thread watches for signals (Ctrl-C) and calls
// progress(done, total). An exception of either ends the work and is raised once that has ended.
template <class T>
T supervised(Watch& watch, const nb::object& progress, const std::function<Result<T>()>& work) {
  const InterruptedHttp interrupted(watch.interrupt);
  std::optional<Result<T>> result;
  std::optional<nb::python_error> raised;
  std::mutex mutex;
  std::condition_variable ended;
  bool is_done = false;
  const auto look = [&] {
    if (raised) return;
    try {
      if (!progress.is_none()) progress(watch.done.load(), watch.total.load());
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    } catch (nb::python_error& e) {
      raised.emplace(std::move(e));
      watch.interrupt = true;
    }
  };
  {
    const nb::gil_scoped_release released;
    std::thread worker;
    const auto body = [&] {
      Result<T> got = catch_exceptions(work);
      const std::lock_guard lock(mutex);
      result = std::move(got);
      is_done = true;
      ended.notify_one();
    };
    try {
      worker = std::thread(body);
    } catch (const std::system_error&) {  // the system refuses another thread
      body();
    }
    std::unique_lock lock(mutex);
    while (!ended.wait_for(lock, kLook, [&] { return is_done; })) {
      lock.unlock();
      {
        const nb::gil_scoped_acquire held;
        look();
      }
      lock.lock();
    }
    lock.unlock();
    if (worker.joinable()) worker.join();
  }
  if (!raised && *result) look();
  if (raised) throw std::move(*raised);
  return value_or_raise(*std::move(result));
}

template <class Work>
auto unlocked(const Work& work) {
  auto result = [&] {
    const nb::gil_scoped_release released;
    return work();
  }();
  return value_or_raise(std::move(result));
}

// Adds the path that was probably meant to an error about a path that does not exist.
template <class R>
R with_meant_path(R result, const std::string& path) {
  if (result || result.error().code() != ErrorCode::kIo) return result;
  const std::string meant = near_path(path);
  return meant.empty() ? result : R(io_error(result.error().message() + meant_text(meant)));
}

nb::tuple tuple_of(const Dims& dims) {
  nb::list out;
  for (const Index n : dims) out.append(n);
  return nb::tuple(out);
}

// Returns a Python string that keeps every character, including NUL.
nb::str text(std::string_view bytes) {
  const std::string utf8 = valid_utf8(std::string(bytes));
  return nb::str(utf8.data(), utf8.size());
}

struct OpenedDevice {
  std::unique_ptr<Device> device;
  Index cap = 0;
};

// Returns the device `name`. Opens each device once and never closes it. Fails if it is open with another cap; 0
// accepts any.
Result<Device*> device_of_process(const std::string& name, Index cap) {
  static std::mutex mutex;
  static auto* const devices = new std::map<int, OpenedDevice>();  // by ordinal: -1 is the CPU, as "auto" chose it
  const std::lock_guard lock(mutex);
  const std::optional<Index> number = name.starts_with("cuda:") ? parse_number(name.substr(5)) : std::nullopt;
  const int expected = number && std::in_range<int>(*number) ? static_cast<int>(*number) : 0;
  auto found = devices->find(expected);
  if (found == devices->end() && name == "auto") found = devices->find(-1);
  if (found == devices->end()) {
    auto device = TRY(open_device(name, cap));
    const int ordinal = device->ordinal();
    found = devices->emplace(ordinal, OpenedDevice{std::move(device), cap}).first;
  }
  if (cap != 0 && cap != found->second.cap)
    return usage_error("gpu_memory: this process uses the device with gpu_memory=" + std::to_string(found->second.cap) +
                       " already, got " + std::to_string(cap) + "; use one value in a process");
  return found->second.device.get();
}

// ---- commands

nb::tuple run_command(const std::string& command, const std::vector<std::string>& words, const nb::object& progress) {
  Watch watch;
  tools::Host host;
  host.interrupt = &watch.interrupt;
  host.resident = held_bytes();
  host.environment = tools::process_environment_of_commands();
  host.device = device_of_process;
  host.progress = [&](Index done, Index total) {
    watch.total = total;
    watch.done = done;
  };
  const int code = supervised<int>(watch, progress, [&] { return tools::run_for(host, command, words); });
  return nb::make_tuple(code, host.answer);
}

int run_program(std::vector<std::string> words) {
  std::vector<char*> argv;
  for (std::string& w : words) argv.push_back(w.data());
  argv.push_back(nullptr);
  const nb::gil_scoped_release released;
  return tools::run_program(static_cast<int>(words.size()), argv.data());
}

// ---- reading

using Checkpoint = LazyCheckpoint;

nb::tuple tensor_facts(const Checkpoint& c, std::size_t i) {
  const Tensor& t = c.catalog().tensors()[i];
  return nb::make_tuple(info(t.dtype).torch_name.data(), tuple_of(t.shape), t.bytes());
}

nb::list names_of(const Checkpoint& c) {
  nb::list out;
  for (std::size_t i = 0; i < c.catalog().tensors().size(); ++i)
    if (c.shows(i)) out.append(nb::make_tuple(text(c.catalog().tensors()[i].name), i));
  return out;
}

nb::list pieces_of_tensor(const std::shared_ptr<Checkpoint>& c, std::size_t i) {
  nb::list out;
  for (const PlacedPiece& p : unlocked([&] { return c->pieces(i); }))
    out.append(
        nb::make_tuple(text(p.file), p.offset, p.length, tuple_of(p.box.origin), tuple_of(p.box.shape), p.is_copy));
  return out;
}

void read_tensor(const std::shared_ptr<Checkpoint>& c, std::size_t i,
                 const std::vector<std::tuple<Index, Index, Index>>& ranges, std::uintptr_t address, Index bytes) {
  const Tensor& t = c->catalog().tensors()[i];
  std::vector<Range> wanted;
  Index elements = 1;
  for (const auto& [start, count, step] : ranges) {
    const Index extent = std::ssize(wanted) < t.shape.rank() ? t.shape[static_cast<int>(wanted.size())] : 0;
    const bool fits = start >= 0 && count >= 0 && step >= 1 &&
                      (count == 0 || (start < extent && count - 1 <= (extent - 1 - start) / step));
    if (!fits) throw nb::index_error("a range is outside the tensor");
    wanted.push_back({start, count, step});
    elements *= count;
  }
  if (std::ssize(wanted) != t.shape.rank() || elements * byte_size(t.dtype) != bytes)
    throw nb::index_error("the ranges do not match the tensor's shape and size");
  auto* out = reinterpret_cast<std::byte*>(address);
  Watch watch;
  if (bytes < kLong)
    unlocked([&] { return c->read(i, wanted, out, watch); });
  else
    supervised<void>(watch, nb::none(), [&] { return c->read(i, wanted, out, watch); });
}

nb::list mesh_axes(const std::shared_ptr<Checkpoint>& c) {
  const InferredMesh* mesh = nullptr;
  {
    const nb::gil_scoped_release released;
    mesh = &c->mesh();
  }
  nb::list out;
  for (const InferredAxis& axis : mesh->axes) out.append(nb::make_tuple(axis.name, axis.size));
  return out;
}

nb::str placement_of(const std::shared_ptr<Checkpoint>& c, std::size_t i) {
  const nb::gil_scoped_release released;
  const std::string placement = c->mesh().placements[i];
  const nb::gil_scoped_acquire held;
  return text(placement);
}

nb::list objects_of(const std::shared_ptr<Checkpoint>& c) {
  nb::list out;
  for (const Blob& b : c->catalog().blobs) out.append(nb::make_tuple(text(b.name), text(c->reader().describe(b))));
  return out;
}

nb::list texts(const std::vector<std::string>& lines) {
  nb::list out;
  for (const std::string& line : lines) out.append(text(line));
  return out;
}

// ---- loading

// A load, with everything that it refers to.
class PyLoad {
 public:
  static std::shared_ptr<PyLoad> prepare(const std::string& path, const std::vector<std::string>& words, Index rank,
                                         const std::string& device, bool check_whole_items) {
    auto out = std::make_shared<PyLoad>();
    out->environment_ = tools::process_environment_of_commands();
    unlocked([&] { return with_meant_path(out->open(path, words, rank, device, check_whole_items), path); });
    return out;
  }

  nb::list tensors() const {
    nb::list out;
    for (const LoadTensor& t : open_.load->tensors())
      out.append(
          nb::make_tuple(text(t.name), info(t.dtype).torch_name.data(), tuple_of(t.shape), tuple_of(t.global_shape)));
    return out;
  }

  // Loads into `to`, which has one (address, strides in elements or None) per tensor.
  nb::dict run(const std::vector<std::pair<std::uintptr_t, std::optional<std::vector<Index>>>>& to,
               const nb::object& progress) {
    std::vector<Destination> destinations;
    for (const auto& [address, strides] : to) {
      destinations.push_back({reinterpret_cast<std::byte*>(address), std::nullopt});
      if (strides && strides->size() <= kMaxRank) destinations.back().strides = Dims(std::span<const Index>(*strides));
    }
    watch_.interrupt = false;
    watch_.done = 0;
    watch_.total = open_.load->bytes();
    const LoadReport report = supervised<LoadReport>(watch_, progress, [&] { return open_.load->run(destinations); });
    nb::dict out, digests;
    for (const LoadProof& p : report.proofs) digests[text(p.name)] = p.part.hex();
    out["bytes_read"] = report.bytes_read;
    out["checksums"] = report.checksums;
    out["digests"] = digests;
    out["warnings"] = texts(open_.load->notes().warnings);
    return out;
  }

 private:
  Status open(const std::string& path, const std::vector<std::string>& words, Index rank, const std::string& device,
              bool check_whole_items) {
    const WantedOptions wanted = TRY(wanted_options(path, words, environment_));
    OpenOptions how = wanted.open;
    how.layout = wanted.source_layout ? &*wanted.source_layout : nullptr;
    LoadOptions o;
    static_cast<Request&>(o) = wanted.conversion;
    o.rank = rank;
    o.run.memory = wanted.conversion.run.memory;
    o.run.threads = wanted.conversion.run.threads;
    o.check_whole_items = check_whole_items;
    o.run.interrupt = &watch_.interrupt;
    o.run.progress = [this](Index bytes) { watch_.done = bytes; };
    if (device != "cpu") o.run.device = TRY(device_of_process(device, 0));
    open_ = TRY(open_load(path, std::move(o), how));
    return {};
  }

  tools::Environment environment_;
  Watch watch_;
  OpenLoad open_;
};

// ---- DLPack

const char* const kCapsule = "dltensor";
const char* const kVersionedCapsule = "dltensor_versioned";  // since DLPack 1.0

// Returns a DLPack capsule for CPU memory. The capsule, or its consumer, keeps a reference to `owner`.
nb::object to_dlpack(std::uintptr_t address, const std::string& dtype, const std::vector<Index>& shape,
                     nb::object owner) {
  const auto type = dtype_from_torch(dtype);
  if (!type || shape.size() > kMaxRank) throw nb::value_error("unknown dtype, or too many dimensions");
  LoadTensor tensor;
  tensor.dtype = *type;
  tensor.shape = Dims(std::span<const Index>(shape));
  PyObject* const object = owner.release().ptr();
  const std::shared_ptr<void> keep(object, [](void* o) {
    if (Py_IsInitialized() == 0) return;
    const nb::gil_scoped_acquire held;
    Py_DECREF(static_cast<PyObject*>(o));
  });
  auto* const managed =
      dlpack::managed(tensor, {reinterpret_cast<std::byte*>(address), std::nullopt}, dlpack::DLDevice{}, keep);
  PyObject* const capsule = PyCapsule_New(managed, kCapsule, [](PyObject* c) {
    if (PyCapsule_IsValid(c, kCapsule) == 0) return;  // taken
    auto* const m = static_cast<dlpack::DLManagedTensor*>(PyCapsule_GetPointer(c, kCapsule));
    m->deleter(m);
  });
  return nb::steal<nb::object>(capsule);
}

// Returns the tensor of a DLPack capsule and its flags, which are 0 before DLPack 1.0.
std::pair<const dlpack::DLTensor*, std::uint64_t> tensor_of(const nb::object& capsule) {
  const bool is_versioned = PyCapsule_IsValid(capsule.ptr(), kVersionedCapsule) != 0;
  const void* const pointer = PyCapsule_GetPointer(capsule.ptr(), is_versioned ? kVersionedCapsule : kCapsule);
  if (!pointer) throw nb::python_error();
  if (!is_versioned) return {&static_cast<const dlpack::DLManagedTensor*>(pointer)->dl_tensor, 0};
  const auto* const m = static_cast<const dlpack::DLManagedTensorVersioned*>(pointer);
  if (m->major != 1) throw nb::type_error("unsupported DLPack version");
  return {&m->dl_tensor, m->flags};
}

// Returns a DLPack capsule's address, shape, strides or None, (code, bits, lanes), (device type, number) and flags.
nb::tuple from_dlpack(const nb::object& capsule) {
  const auto [tensor, flags] = tensor_of(capsule);
  const dlpack::DLTensor& t = *tensor;
  nb::list shape, strides;
  for (int d = 0; d < t.ndim; ++d) {
    shape.append(t.shape[d]);
    if (t.strides) strides.append(t.strides[d]);
  }
  return nb::make_tuple(reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset, nb::tuple(shape),
                        t.strides ? nb::object(nb::tuple(strides)) : nb::object(nb::none()),
                        nb::make_tuple(t.dtype.code, t.dtype.bits, t.dtype.lanes),
                        nb::make_tuple(t.device.device_type, t.device.device_id), flags);
}

nb::tuple dlpack_type(const std::string& dtype) {
  const auto type = dtype_from_torch(dtype);
  if (!type) throw nb::value_error("unknown dtype");
  const dlpack::DLDataType t = dlpack::data_type(*type);
  return nb::make_tuple(t.code, t.bits, t.lanes);
}

}  // namespace
}  // namespace reshard::python

NB_MODULE(_reshard, m) {
  using namespace reshard;          // NOLINT(google-build-using-namespace)
  using namespace reshard::python;  // NOLINT(google-build-using-namespace)
  nb::register_exception_translator(translate);
  m.attr("version") = RESHARD_VERSION;
  m.def("run_command", &run_command, nb::arg("command"), nb::arg("words"), nb::arg("progress").none());
  m.def("run_program", &run_program);
  m.def("to_dlpack", &to_dlpack);
  m.def("from_dlpack", &from_dlpack);
  m.def("dlpack_type", &dlpack_type);
  m.def("open", [](const std::string& path, const std::vector<std::string>& words) {
    const tools::Environment environment = tools::process_environment_of_commands();
    return unlocked([&] { return with_meant_path(Checkpoint::open(path, words, environment), path); });
  });
  nb::class_<Checkpoint>(m, "Checkpoint")
      .def_prop_ro("format", [](const Checkpoint& c) { return text(c.format().name); })
      .def_prop_ro("title", [](const Checkpoint& c) { return text(c.format().title); })
      .def_prop_ro("root", [](const Checkpoint& c) { return text(c.catalog().root); })
      .def_prop_ro("warnings", [](const Checkpoint& c) { return texts(c.catalog().warnings); })
      .def("names", &names_of)
      .def("metadata",
           [](const Checkpoint& c) {
             nb::list out;
             for (const auto& [key, value] : c.catalog().header_metadata)
               out.append(nb::make_tuple(text(key), text(value)));
             return out;
           })
      .def("facts", &tensor_facts)
      .def("pieces", &pieces_of_tensor)
      .def("read", &read_tensor)
      .def("mesh", &mesh_axes)
      .def("placement", &placement_of)
      .def("objects", &objects_of)
      .def("view", [](const Checkpoint& c, const std::vector<std::string>& words) {
        return unlocked([&] { return c.view(words); });
      });
  nb::class_<PyLoad>(m, "Load")
      .def_static("prepare", &PyLoad::prepare)
      .def("tensors", &PyLoad::tensors)
      .def("run", &PyLoad::run, nb::arg("destinations"), nb::arg("progress").none());
}
