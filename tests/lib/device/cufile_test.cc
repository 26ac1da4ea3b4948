// Tests reading through cuFile, with a fake library that reads into ordinary memory.
#include "lib/device/cuda/cufile.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <random>

#include "lib/base/parallel.h"
#include "lib/base/syscalls.h"
#include "tests/support/fake_cufile.h"
#include "tests/support/temp_dir.h"

namespace reshard::cufile_test {
namespace {

using testing::StartsWith;

TEST(LoadCuFile, ALibraryThatIsNotThereIsAnErrorThatNamesIt) {
  const auto loaded = load_cufile("libcufile_of_nobody.so.0", {});
  ASSERT_FALSE(loaded);
  EXPECT_EQ(loaded.error().code(), ErrorCode::kUnsupported);
  EXPECT_THAT(loaded.error().message(), StartsWith("cufile: cannot open libcufile_of_nobody.so.0: "));
}

TEST(LoadCuFile, IsNotOpenedWhereWhatItNeedsIsMissing) {
  const TempDir dir;
  fresh_fake_cufile();
  EXPECT_TRUE(load_cufile(RESHARD_FAKE_CUFILE, {dir.path()}));
  const auto loaded = load_cufile("libcufile_of_nobody.so.0", {dir.path(), dir / "udev"});
  ASSERT_FALSE(loaded);
  EXPECT_EQ(loaded.error().message(), "cufile: not found: " + (dir / "udev"));
}

TEST(LoadCuFile, AFunctionThatIsMissingIsAnErrorThatNamesIt) {
  const auto loaded = load_cufile(RESHARD_PARTIAL_CUFILE, {});
  ASSERT_FALSE(loaded);
  EXPECT_EQ(loaded.error().message(), std::string("cufile: ") + RESHARD_PARTIAL_CUFILE + " has no cuFileRead");
}

TEST(LoadCuFile, ADriverThatDoesNotOpenIsAnErrorWithItsCode) {
  fresh_fake_cufile().open_code = 5001;
  const auto loaded = load_cufile(RESHARD_FAKE_CUFILE, {});
  ASSERT_FALSE(loaded);
  EXPECT_EQ(loaded.error().message(), "cufile: cannot open the driver: expected code 0, got 5001");
}

TEST(LoadCuFile, ADriverThatSomebodyElseHasOpenedWillDo) {
  fresh_fake_cufile().open_code = cufile::kAlreadyOpen;
  EXPECT_TRUE(load_cufile(RESHARD_FAKE_CUFILE, {}));
}

std::shared_ptr<const File> open_file(const std::string& path) {
  auto file = File::open(path);
  EXPECT_TRUE(file);
  return std::make_shared<const File>(*std::move(file));
}

// A file of random bytes with a reader. Temporary directories may be on file systems without O_DIRECT, which the fake
// library does not need, so the flag is removed from system calls.
class CuFile : public testing::Test {
 protected:
  CuFile() {
    std::mt19937 random(3);
    for (char& c : bytes_) c = static_cast<char>(random());
    file_ = open_file(dir_.write("model.safetensors", bytes_));
    Syscalls calls = sys();
    calls.open = [](const char* path, int flags, mode_t mode) { return ::open(path, flags & ~O_DIRECT, mode); };
    without_direct_.emplace(calls);
  }

  Result<bool> read(const std::shared_ptr<const File>& file, Index offset, Index n) {
    got_.assign(static_cast<std::size_t>(n), '\0');
    return reader_->read(file, offset, {reinterpret_cast<std::byte*>(got_.data()), got_.size()});
  }
  // Expects that all bytes of the file are read.
  void expect_read(const std::shared_ptr<const File>& file, Index offset, Index n) {
    const auto read_it = read(file, offset, n);
    ASSERT_TRUE(read_it.has_value()) << read_it.error().message();
    EXPECT_TRUE(*read_it);
    EXPECT_TRUE(got_ == bytes_.substr(static_cast<std::size_t>(offset), static_cast<std::size_t>(n)));
  }
  void expect_refused() {
    const auto read_it = read(file_, 0, 100);
    ASSERT_TRUE(read_it.has_value()) << read_it.error().message();
    EXPECT_FALSE(*read_it);
  }

  TempDir dir_;
  FakeCuFile& fake_ = fresh_fake_cufile();
  std::unique_ptr<CuFileReader> reader_ = std::make_unique<CuFileReader>(*load_cufile(RESHARD_FAKE_CUFILE, {}));
  std::string bytes_ = std::string(100000, '\0');
  std::shared_ptr<const File> file_;
  std::string got_;
  std::optional<ScopedSyscalls> without_direct_;
};

TEST_F(CuFile, ReadsWhatTheFileHolds) {
  std::mt19937 random(4);
  for (int i = 0; i < 100; ++i) {
    const Index offset = static_cast<Index>(random() % bytes_.size());
    expect_read(file_, offset, static_cast<Index>(random() % (bytes_.size() - static_cast<std::size_t>(offset) + 1)));
  }
  EXPECT_EQ(fake_.register_calls, 1);
}

TEST_F(CuFile, PartialAndInterruptedReadsAreCarriedThrough) {
  fake_.most = 777;
  fake_.interruptions = 3;
  expect_read(file_, 17, 60000);
  EXPECT_EQ(fake_.read_calls, 3 + (60000 + 776) / 777);
}

TEST_F(CuFile, AFileIsRegisteredOnceForAllThreads) {
  const Status status = parallel_for(200, 4, [&](int, Index i) -> Status {
    std::string got(100, '\0');
    const bool is_read = TRY(reader_->read(file_, i * 100, {reinterpret_cast<std::byte*>(got.data()), got.size()}));
    if (!is_read || got != bytes_.substr(static_cast<std::size_t>(i) * 100, 100)) return internal_error("wrong bytes");
    return {};
  });
  EXPECT_TRUE(status);
  EXPECT_EQ(fake_.register_calls, 1);
  EXPECT_EQ(fake_.registered, 1);
}

TEST_F(CuFile, IsLetGoOfWithItsReader) {
  expect_read(file_, 0, 10);
  EXPECT_EQ(fake_.registered, 1);
  EXPECT_EQ(file_.use_count(), 2);
  reader_.reset();
  EXPECT_EQ(fake_.registered, 0);
  EXPECT_EQ(file_.use_count(), 1);
}

TEST_F(CuFile, TheFilesUsedLastStayRegistered) {
  constexpr int kFiles = static_cast<int>(CuFileReader::kMaxFiles) + 8;
  std::vector<std::shared_ptr<const File>> files;
  for (int i = 0; i < kFiles; ++i) files.push_back(open_file(dir_.write(std::to_string(i), bytes_)));
  for (int i = 0; i < kFiles; ++i) {
    expect_read(files[static_cast<std::size_t>(i)], i, 50);
    expect_read(files[0], i, 50);
  }
  EXPECT_EQ(fake_.register_calls, kFiles);
  EXPECT_EQ(fake_.registered, static_cast<int>(CuFileReader::kMaxFiles));
  expect_read(files[1], 0, 50);
  EXPECT_EQ(fake_.register_calls, kFiles + 1);
}

TEST_F(CuFile, ReadsTheFileThatIsOpenAndNotTheOneOfItsName) {
  ASSERT_TRUE(remove_file(file_->path()));
  dir_.write("model.safetensors", "another");
  expect_read(file_, 500, 5000);
}

TEST_F(CuFile, AFileThatItRefusesIsAskedAboutOnce) {
  fake_.register_code = 5008;  // not supported on this file
  for (int i = 0; i < 3; ++i) expect_refused();
  EXPECT_EQ(fake_.register_calls, 1);
  EXPECT_EQ(fake_.read_calls, 0);
}

TEST_F(CuFile, AFileSystemWithoutDirectReadingIsNotAsked) {
  Syscalls calls = sys();
  calls.open = [](const char* path, int flags, mode_t mode) {
    errno = EINVAL;
    return (flags & O_DIRECT) != 0 ? -1 : ::open(path, flags, mode);
  };
  const ScopedSyscalls no_direct(calls);
  expect_refused();
  EXPECT_EQ(fake_.register_calls, 0);
}

TEST_F(CuFile, AReadThatItCannotDoIsARefusalOfTheFile) {
  fake_.read_result = -5036;  // no GPU memory to be pinned
  for (int i = 0; i < 3; ++i) expect_refused();
  EXPECT_EQ(fake_.read_calls, 1);
  EXPECT_EQ(fake_.registered, 0);
}

TEST_F(CuFile, AnErrorOfReadingNamesThePlaceAndTheReason) {
  fake_.read_result = -1;
  fake_.read_errno = EIO;
  const auto failed = read(file_, 4321, 10);
  ASSERT_FALSE(failed.has_value());
  EXPECT_EQ(failed.error().code(), ErrorCode::kIo);
  EXPECT_EQ(failed.error().message(), at(file_->path(), 4321) + ": cannot read with cuFile: " + std::strerror(EIO));
}

TEST_F(CuFile, AnEndOfFileIsCorruptAndSaysHowMuchWasThere) {
  const auto failed = read(file_, 99990, 100);
  ASSERT_FALSE(failed.has_value());
  EXPECT_EQ(failed.error().code(), ErrorCode::kCorrupt);
  EXPECT_EQ(failed.error().message(),
            at(file_->path(), 99990) + ": expected 100 bytes, got 10 before the end of the file");
}

}  // namespace
}  // namespace reshard::cufile_test
