// SPDX-License-Identifier: Apache-2.0
#include "lib/device/device.h"

#include <array>
#include <string>
#include <utility>

#include "lib/base/memory_limit.h"
#include "lib/base/text.h"
#include "lib/device/cpu_device.h"
#include "lib/device/cuda/cuda_device.h"

namespace reshard {
namespace {

// A kind of device: how to count and to open them.
struct Kind {
  std::string_view name;
  Result<int> (*count)();
  Result<std::unique_ptr<Device>> (*open)(int ordinal, Index memory_cap);
};

Result<int> count_cpus() { return 1; }
Result<std::unique_ptr<Device>> open_cpu(int, Index memory_cap) { return make_cpu_device(memory_cap); }

// In the order of "auto", which takes the first that exists.
constexpr std::array<Kind, 2> kKinds = {{
    {"cuda", count_cuda_devices, open_cuda_device},
    {"cpu", count_cpus, open_cpu},
}};

Result<std::unique_ptr<Device>> open_nth(const Kind& kind, const std::string& ordinal_text, Index memory_cap) {
  const auto ordinal = parse_number(ordinal_text);
  if (!ordinal || !std::in_range<int>(*ordinal))
    return usage_error("device: expected a number after '" + std::string(kind.name) + ":', got '" +
                       printable(ordinal_text) + "'");
  const int count = TRY(kind.count());
  const std::string prefix = std::string(kind.name) + ":";
  if (*ordinal >= count)
    return usage_error("device: expected " + prefix + "0" +
                       (count == 1 ? ", the only one" : " to " + prefix + std::to_string(count - 1)) + ", got " +
                       prefix + ordinal_text);
  return kind.open(static_cast<int>(*ordinal), memory_cap);
}

Result<std::unique_ptr<Device>> open_any(const Kind& kind, int local_rank, Index memory_cap) {
  return kind.open(local_rank % TRY(kind.count()), memory_cap);
}

}  // namespace

Result<std::unique_ptr<Device>> open_device(const std::string& name, Index memory_cap, int local_rank) {
  if (memory_cap < 0)
    return usage_error("device: expected a memory cap of 0 bytes or more, got " + std::to_string(memory_cap));
  static DriverMemory driver_memory;
  const DriverMemory::Opening opening(driver_memory);
  const std::size_t colon = name.find(':');
  const std::string kind_name = name.substr(0, colon);
  for (const Kind& kind : kKinds) {
    if (name == kind.name) return open_any(kind, local_rank, memory_cap);
    if (name == "auto") {
      auto device = open_any(kind, local_rank, memory_cap);
      if (device || device.error().code() != ErrorCode::kUnsupported) return device;
    }
    if (kind_name == kind.name) return open_nth(kind, name.substr(colon + 1), memory_cap);
  }
  return usage_error("device: expected cpu, cuda, cuda:N or auto, got '" + printable(name) + "'");
}

}  // namespace reshard
