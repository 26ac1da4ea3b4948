#include "tests/support/split_device.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace reshard {
namespace {

class SplitMemory : public Device::Memory {
 public:
  SplitMemory(std::unique_ptr<Memory> host, std::size_t bytes)
      : host_(std::move(host)), device_(bytes, std::byte(0xA5)) {
    const MutableBytes memory = host_->buffer().host;
    std::fill(memory.begin(), memory.end(), std::byte(0x5A));
  }
  DeviceBuffer buffer() const override { return {host_->buffer().host, device_}; }

 private:
  std::unique_ptr<Memory> host_;
  mutable std::vector<std::byte> device_;
};

// A stream that queues work like a GPU: nothing happens before wait().
class SplitStream : public Stream {
 public:
  SplitStream(std::unique_ptr<Stream> cpu, std::shared_ptr<CuFileReader> files)
      : cpu_(std::move(cpu)), files_(std::move(files)) {}

  bool reads_files() const override { return files_ != nullptr; }
  Result<bool> read_file(const std::shared_ptr<const File>& file, Index offset, MutableBytes to) override {
    if (!steps_.empty()) return internal_error("a file is read while work is queued that may use the memory");
    return files_->read(file, offset, to);
  }

  Status upload(const DeviceBuffer& b, Index bytes) override {
    return later([=]() -> Status {
      std::memcpy(b.device.data(), b.host.data(), static_cast<std::size_t>(bytes));
      return {};
    });
  }
  Status download(const DeviceBuffer& b, Index bytes) override {
    return later([=]() -> Status {
      std::memcpy(b.host.data(), b.device.data(), static_cast<std::size_t>(bytes));
      return {};
    });
  }
  Status copy_box(const Dims& shape, Index element_bytes, const std::byte* from, const Dims& from_strides,
                  std::byte* to, const Dims& to_strides) override {
    return later([=, this] { return cpu_->copy_box(shape, element_bytes, from, from_strides, to, to_strides); });
  }
  Status convert(DType from, DType to, const std::byte* in, std::byte* out, Index n) override {
    return later([=, this] { return cpu_->convert(from, to, in, out, n); });
  }
  Status digest_box(const Dims& tensor_shape, const Box& box, Index element_bytes, const std::byte* data,
                    Digest* out) override {
    return later([=, this] { return cpu_->digest_box(tensor_shape, box, element_bytes, data, out); });
  }
  Status wait() override {
    for (const auto& step : std::exchange(steps_, {})) TRY(step());
    return {};
  }

 private:
  Status later(std::function<Status()> step) {
    steps_.push_back(std::move(step));
    return {};
  }
  std::unique_ptr<Stream> cpu_;
  std::shared_ptr<CuFileReader> files_;
  std::vector<std::function<Status()>> steps_;
};

}  // namespace

Result<std::unique_ptr<Device::Memory>> SplitDevice::allocate(Index bytes, Sides sides) {
  return std::unique_ptr<Memory>(std::make_unique<SplitMemory>(
      TRY(cpu_device().allocate(sides == Sides::kBoth ? bytes : 0)), static_cast<std::size_t>(bytes)));
}

Result<std::unique_ptr<Stream>> SplitDevice::stream() {
  return std::unique_ptr<Stream>(std::make_unique<SplitStream>(TRY(cpu_device().stream()), files_));
}

}  // namespace reshard
