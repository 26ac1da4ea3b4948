// A device whose memory is not the host's, made of ordinary memory: what a GPU would be given, and nothing it would not
// see. Whoever forgets to upload or to download gets wrong bytes on every machine. Its streams read files if they are
// given a way to do so.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "lib/device/cuda/cufile.h"
#include "lib/device/device.h"
#include "lib/transport/transport.h"

namespace reshard {

class SplitDevice : public Device {
 public:
  explicit SplitDevice(std::shared_ptr<CuFileReader> files = nullptr) : files_(std::move(files)) {}
  std::string_view name() const override { return "split"; }
  bool is_cpu() const override { return false; }
  Result<std::unique_ptr<Memory>> allocate(Index bytes, Sides sides = Sides::kBoth) override;
  Result<std::unique_ptr<Stream>> stream() override;

 private:
  std::shared_ptr<CuFileReader> files_;
};

// Sends through another transport what is said to lie in device memory.
class DeviceTransport : public Transport {
 public:
  explicit DeviceTransport(Transport& inner) : inner_(inner) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  bool moves_device_memory() const override { return true; }
  bool stopped() const override { return inner_.stopped(); }
  Result<std::unique_ptr<Transfer>> start(std::vector<Outgoing> out, std::vector<Incoming> in) override {
    return inner_.start(std::move(out), std::move(in));
  }

 private:
  Transport& inner_;
};

}  // namespace reshard
