// SPDX-License-Identifier: Apache-2.0
// DLPack: how array libraries (PyTorch, CuPy, JAX, NumPy ...) share tensors in memory without copying.
//
// A tensor is a small C struct: address, device, dtype, shape, strides. The structs here have the layout of DLPack's
// own (https://dmlc.github.io/dlpack, the unversioned ABI of 0.8 and 1.x), so pointers to them are interchangeable.
// They are in a namespace, so that dlpack.h can be included too.
//
//   auto to = dlpack::destination(*engine_tensor, load->tensors()[i], device);   // load into an engine's tensor
//   dlpack::TensorView view(load->tensors()[i], destination, dlpack::kCpu);      // show what was loaded
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "lib/base/text.h"
#include "lib/load/load.h"

namespace reshard::dlpack {

// Memory types (DLDeviceType).
enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

struct DLDevice {
  std::int32_t device_type = kCpu;
  std::int32_t device_id = 0;
};

// Element types (DLDataTypeCode).
enum TypeCode : std::uint8_t {
  kInt = 0,
  kUint = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E4M3Fn = 10,
  kFloat8E4M3Fnuz = 11,
  kFloat8E5M2 = 12,
  kFloat8E5M2Fnuz = 13,
  kFloat8E8M0Fnu = 14,
  kFloat4E2M1Fn = 17,
};

struct DLDataType {
  std::uint8_t code = kFloat;
  std::uint8_t bits = 32;
  std::uint16_t lanes = 1;

  friend bool operator==(const DLDataType&, const DLDataType&) = default;
};

struct DLTensor {
  void* data = nullptr;
  DLDevice device;
  std::int32_t ndim = 0;
  DLDataType dtype;
  std::int64_t* shape = nullptr;
  std::int64_t* strides = nullptr;  // elements; null: row-major
  std::uint64_t byte_offset = 0;    // from `data` to the first element
};
static_assert(sizeof(void*) != 8 || (sizeof(DLTensor) == 48 && offsetof(DLTensor, byte_offset) == 40));

// A tensor with its owner. The consumer must call `deleter` once, when done.
struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx = nullptr;
  void (*deleter)(DLManagedTensor* self) = nullptr;
};
static_assert(sizeof(void*) != 8 || sizeof(DLManagedTensor) == 64);

// The producer's statements about the memory (DLPACK_FLAG_BITMASK_*).
enum Flag : std::uint64_t { kReadOnly = 1, kIsCopied = 2 };

// DLManagedTensor since DLPack 1.0, whose major version is 1.
struct DLManagedTensorVersioned {
  std::uint32_t major = 1, minor = 0;
  void* manager_ctx = nullptr;
  void (*deleter)(DLManagedTensorVersioned* self) = nullptr;
  std::uint64_t flags = 0;
  DLTensor dl_tensor;
};
static_assert(sizeof(void*) != 8 || offsetof(DLManagedTensorVersioned, dl_tensor) == 32);

// Returns the DLPack type of a dtype; every dtype has one.
inline DLDataType data_type(DType dtype) {
  const auto of = [&](TypeCode code) { return DLDataType{code, static_cast<std::uint8_t>(8 * byte_size(dtype)), 1}; };
  switch (dtype) {
    case DType::kBool:
      return of(kBool);
    case DType::kUint8:
    case DType::kUint16:
    case DType::kUint32:
    case DType::kUint64:
      return of(kUint);
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
      return of(kInt);
    case DType::kFloat8E4M3:
      return of(kFloat8E4M3Fn);
    case DType::kFloat8E4M3Fnuz:
      return of(kFloat8E4M3Fnuz);
    case DType::kFloat8E5M2:
      return of(kFloat8E5M2);
    case DType::kFloat8E5M2Fnuz:
      return of(kFloat8E5M2Fnuz);
    case DType::kFloat8E8M0:
      return of(kFloat8E8M0Fnu);
    case DType::kFloat4E2M1x2:
      return {kFloat4E2M1Fn, 4, 2};
    case DType::kBFloat16:
      return of(kBfloat);
    case DType::kFloat16:
    case DType::kFloat32:
    case DType::kFloat64:
      return of(kFloat);
    case DType::kComplex32:
    case DType::kComplex64:
    case DType::kComplex128:
      return of(kComplex);
  }
  return {};
}

// A loaded tensor in its destination as a DLTensor, valid as long as the view and the memory. Owns neither.
class TensorView {
 public:
  TensorView(const LoadTensor& tensor, const Destination& destination, DLDevice device)
      : shape_(tensor.shape), strides_(destination.strides.value_or(row_major_strides(tensor.shape))) {
    tensor_ = {destination.data, device, tensor.shape.rank(), data_type(tensor.dtype), &shape_[0], &strides_[0], 0};
  }
  TensorView(const TensorView&) = delete;
  TensorView& operator=(const TensorView&) = delete;

  const DLTensor& tensor() const { return tensor_; }

 private:
  Dims shape_, strides_;
  DLTensor tensor_;
};

// Returns the same as a DLManagedTensor for another owner. `memory` is held until the new owner calls the deleter.
inline DLManagedTensor* managed(const LoadTensor& tensor, const Destination& destination, DLDevice device,
                                std::shared_ptr<void> memory) {
  struct Held {
    Held(const LoadTensor& t, const Destination& d, DLDevice on, std::shared_ptr<void> m)
        : view(t, d, on), memory(std::move(m)) {}
    TensorView view;
    std::shared_ptr<void> memory;
    DLManagedTensor out;
  };
  auto held = std::make_unique<Held>(tensor, destination, device, std::move(memory));
  held->out = {held->view.tensor(), held.get(),
               [](DLManagedTensor* self) { delete static_cast<Held*>(self->manager_ctx); }};
  return &held.release()->out;
}

// Returns whether `device` can access memory of this type.
inline bool reaches(const Device& device, const DLDevice& memory) {
  if (device.is_cpu())
    return memory.device_type == kCpu || memory.device_type == kCudaHost || memory.device_type == kCudaManaged;
  const std::string_view name = device.name().substr(0, device.name().find(' '));
  return memory.device_type == kCudaManaged ||
         (memory.device_type == kCuda && name == "cuda:" + std::to_string(memory.device_id));
}

// Returns a caller's tensor as the destination for a tensor that `device` loads. A usage error if the memory is on
// another device, or the dtype or shape differs. The load itself checks the strides.
inline Result<Destination> destination(const DLTensor& to, const LoadTensor& tensor, const Device& device) {
  const auto refused = [&](const std::string& what, const std::string& expected, const std::string& got) {
    return usage_error("DLTensor for '" + printable(tensor.name) + "': " + what + ": expected " + expected + ", got " +
                       got);
  };
  const auto text = [](const DLDataType& t) {
    return "type code " + std::to_string(t.code) + " of " + std::to_string(t.bits) + " bits and " +
           count_of(t.lanes, "lane");
  };
  if (!reaches(device, to.device))
    return refused(
        "device", "memory of " + std::string(device.name()),
        "device type " + std::to_string(to.device.device_type) + ", number " + std::to_string(to.device.device_id));
  if (const DLDataType expected = data_type(tensor.dtype); to.dtype != expected)
    return refused("dtype", std::string(info(tensor.dtype).torch_name) + " (" + text(expected) + ")", text(to.dtype));
  if (to.ndim != tensor.shape.rank())
    return refused("dimensions", std::to_string(tensor.shape.rank()), std::to_string(to.ndim));
  const std::size_t n = to.ndim;
  const Dims shape(n > 0 ? std::span<const Index>(to.shape, n) : std::span<const Index>());
  if (shape != tensor.shape) return refused("shape", to_string(tensor.shape), to_string(shape));
  Destination out{static_cast<std::byte*>(to.data), std::nullopt};
  if (out.data) out.data += to.byte_offset;
  if (to.strides && n > 0) out.strides = Dims(std::span<const Index>(to.strides, n));
  return out;
}

}  // namespace reshard::dlpack
