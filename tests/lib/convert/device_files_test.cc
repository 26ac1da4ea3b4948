// Tests conversions on a device that reads files itself: which reads it gets, and that the output is the same.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <random>

#include "formats/load.h"
#include "formats/open.h"
#include "lib/base/syscalls.h"
#include "lib/convert/conversion.h"
#include "tests/support/checkpoints.h"
#include "tests/support/fake_cufile.h"
#include "tests/support/split_device.h"
#include "tests/support/temp_dir.h"

namespace reshard::device_files_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

struct Request {
  std::string to = "dcp";
  std::string mesh = "";
  std::optional<DType> dtype = std::nullopt;
  bool is_model = false;  // whether its names are a family's
};

Status convert_on(Device* device, const std::string& from, const std::string& into, const Request& job) {
  const Format* format = TRY(find_format(job.to));
  auto source = TRY(open_checkpoint(from));
  ConversionOptions o;
  o.source_path = "the source";  // for the manifest
  o.model.detect = job.is_model;
  const std::string config = path_join(parent_path(from), "config.json");
  o.config_path = *path_exists(config) ? config : "";
  if (!job.mesh.empty()) o.placement.mesh = TRY(Mesh::parse(job.mesh));
  o.typing.dtype = job.dtype;
  o.run.memory = Index{1} << 30;
  o.run.threads = 3;
  o.run.device = device;
  auto conversion = TRY(Conversion::prepare(*source.reader, *format, std::move(o)));
  TRY(conversion->run({into}));
  return {};
}

// Files are opened without O_DIRECT, which the fake library does not need and temporary directories may not support.
class DeviceFiles : public testing::Test {
 protected:
  DeviceFiles() {
    Syscalls calls = sys();
    calls.open = [](const char* path, int flags, mode_t mode) { return ::open(path, flags & ~O_DIRECT, mode); };
    without_direct_.emplace(calls);
    std::mt19937 random(9);
    const auto add = [&](const std::string& name, const Dims& shape) {
      std::string bytes(static_cast<std::size_t>(volume(shape) * 2), '\0');
      for (char& c : bytes) c = static_cast<char>(random() & 0x3f);  // finite numbers
      tensors_[name] = {DType::kFloat16, shape, bytes};
      bytes_ += std::ssize(bytes);
    };
    add("a.weight", {1021, 1024});
    add("b.weight", {1024, 509});
    add("c.bias", {5});
    add("d.scalar", {});
    write_dcp(tensors_, dir_ / "dcp", *Mesh::parse("dp_shard=5"));
    EXPECT_TRUE(convert_on(nullptr, dir_ / "dcp", dir_ / "hf", {.to = "hf"}));
  }

  SplitDevice reading_device() {
    return SplitDevice(std::make_shared<CuFileReader>(*load_cufile(RESHARD_FAKE_CUFILE, {})));
  }

  // Converts on the CPU and on a device that reads files: the same bytes come out.
  void expect_equal(const std::string& from, const Request& job) {
    const std::string cpu = dir_ / ("cpu" + std::to_string(made_)), gpu = dir_ / ("gpu" + std::to_string(made_));
    ++made_;
    SplitDevice device = reading_device();
    const Status one = convert_on(nullptr, from, cpu, job), other = convert_on(&device, from, gpu, job);
    ASSERT_TRUE(one) << one.error().message();
    ASSERT_TRUE(other) << other.error().message();
    EXPECT_TRUE(all_files(gpu) == all_files(cpu)) << from << " to " << job.to;
  }
  Error error_of(const std::string& from) {
    SplitDevice device = reading_device();
    const Status status = convert_on(&device, from, dir_ / "failed", {.mesh = "tp=3"});
    return status ? internal_error("there is no error") : status.error();
  }

  TempDir dir_;
  FakeCuFile& fake_ = fresh_fake_cufile();
  TensorValues tensors_;
  Index bytes_ = 0;  // bytes of all tensors
  int made_ = 0;
  std::optional<ScopedSyscalls> without_direct_;
};

TEST_F(DeviceFiles, SafetensorsAreReadOnceAndByTheDeviceOnly) {
  for (const Request& job :
       {Request{.to = "hf"}, Request{.to = "dcp"}, Request{.mesh = "tp=2", .dtype = DType::kFloat32}}) {
    fake_.bytes_read = 0;
    expect_equal(dir_ / "hf", job);
    EXPECT_EQ(fake_.bytes_read, bytes_) << job.to;
    EXPECT_EQ(fake_.registered, 0);
  }
}

TEST_F(DeviceFiles, LoadsAreReadByTheDeviceOnly) {
  SplitDevice device = reading_device();
  LoadOptions options;
  options.run.device = &device;
  options.run.threads = 3;
  std::map<std::string, std::unique_ptr<Device::Memory>> memory;
  const auto report = load(dir_ / "hf", options, [&](const LoadTensor& t) -> Result<Destination> {
    memory[t.name] = TRY(device.allocate(t.bytes()));
    return Destination{memory[t.name]->buffer().device.data(), std::nullopt};
  });
  ASSERT_TRUE(report) << report.error().message();
  EXPECT_EQ(fake_.bytes_read, bytes_);
  ASSERT_EQ(memory.size(), tensors_.size());
  for (const auto& [name, value] : tensors_) {
    const MutableBytes got = memory[name]->buffer().device;
    EXPECT_TRUE(std::ranges::equal(got, as_bytes(value.bytes))) << name;
  }
}

TEST_F(DeviceFiles, ItemsWithAChecksumGoThroughHostMemory) {
  expect_equal(dir_ / "dcp", {.to = "hf"});
  EXPECT_EQ(fake_.read_calls, 0);
}

TEST_F(DeviceFiles, OfShardsRowsAreReadByTheDeviceAndColumnsThroughHostMemory) {
  const std::string shards = dir_ / "shards";
  ASSERT_TRUE(convert_on(nullptr, sample("tp8") + "/hf.safetensors", shards,
                         {.to = "ranks", .mesh = "tp=2", .is_model = true}));
  Index in_runs = 0, all = 0;
  for (const auto& [name, value] : load_checkpoint(shards)) {
    const bool columns = name.find("o_proj") != std::string::npos || name.find("down_proj") != std::string::npos;
    all += std::ssize(value.bytes);
    if (!columns) in_runs += std::ssize(value.bytes);
  }
  expect_equal(shards, {.to = "hf"});
  EXPECT_LT(in_runs, all);
  EXPECT_EQ(fake_.bytes_read, in_runs);
}

TEST_F(DeviceFiles, AFileThatIsRefusedGoesThroughHostMemory) {
  fake_.register_code = 5018;
  expect_equal(dir_ / "hf", {.mesh = "tp=3"});
  EXPECT_GT(fake_.register_calls, 0);
  EXPECT_EQ(fake_.read_calls, 0);

  fake_.register_code = 0;
  fake_.read_result = -5009;
  expect_equal(dir_ / "hf", {.mesh = "tp=3"});
  EXPECT_GT(fake_.read_calls, 0);
  EXPECT_EQ(fake_.bytes_read, 0);
}

TEST_F(DeviceFiles, AnErrorOfReadingNamesTensorFileAndOffset) {
  fake_.read_result = -1;
  fake_.read_errno = EIO;
  const Error error = error_of(dir_ / "hf");
  EXPECT_EQ(error.code(), ErrorCode::kIo);
  EXPECT_THAT(error.message(),
              testing::MatchesRegex("tensor '[abcd].*' \\[.*: .*/hf/model.safetensors@0x[0-9a-f]+: cannot "
                                    "read with cuFile: Input/output error"));
}

TEST_F(DeviceFiles, AFileThatEndsTooSoonIsCorrupt) {
  fake_.most = 1000;  // a short read is not the end
  expect_equal(dir_ / "hf", {.mesh = "tp=3"});

  // The file is truncated after it was opened.
  static const std::string* cut_off = nullptr;
  const std::string file = dir_ / "hf/model.safetensors";
  cut_off = &file;
  Syscalls calls = sys();
  calls.open = [](const char* path, int flags, mode_t mode) {
    if ((flags & O_DIRECT) != 0 && (flags & O_ACCMODE) == O_RDONLY)
      std::filesystem::resize_file(*cut_off, std::filesystem::file_size(*cut_off) / 4);
    return ::open(path, flags & ~O_DIRECT, mode);
  };
  const ScopedSyscalls cutting(calls);
  const Error error = error_of(dir_ / "hf");
  EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
  EXPECT_THAT(error.message(), AllOf(HasSubstr("tensor '"), HasSubstr("model.safetensors@"), HasSubstr(": expected "),
                                     HasSubstr(" bytes, got "), HasSubstr(" before the end of the file")));
}

}  // namespace
}  // namespace reshard::device_files_test
