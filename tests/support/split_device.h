// A device that keeps its memory apart from the host's although it is ordinary memory: code that forgets to upload or
// download gets wrong bytes on every machine. Its streams read files if they are given a function for that.
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

// A transport for device memory that sends through another transport.
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
