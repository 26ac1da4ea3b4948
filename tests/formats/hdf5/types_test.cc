// Tests types, attributes and errors of the HDF5 library without a checkpoint.
#include "formats/hdf5/types.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace reshard::hdf5::types_test {
namespace {

using testing::HasSubstr;

TEST(Hdf5Types, EveryDtypeIsReadAsItIsWritten) {
  const LibraryLock lock;
  int named = 0;
  for (int i = 0; i < static_cast<int>(DType::kFloat4E2M1x2); ++i) {
    const auto dtype = static_cast<DType>(i);
    for (const bool big_endian : {false, true}) {
      const auto type = type_of(dtype, big_endian);
      ASSERT_TRUE(type) << info(dtype).torch_name << ": " << type.error().message();
      const std::string attribute(needs_attribute(dtype) ? info(dtype).torch_name : "");
      const auto read = read_type(type->get(), attribute);
      ASSERT_TRUE(read) << info(dtype).torch_name << ": " << read.error().message();
      EXPECT_EQ(read->dtype, dtype) << info(dtype).torch_name;
      const bool is_component_larger = byte_size(dtype) > 1;
      EXPECT_EQ(read->big_endian, big_endian && is_component_larger) << info(dtype).torch_name;
    }
    named += needs_attribute(dtype);
  }
  EXPECT_EQ(named, 4) << "kinds of float8 that HDF5 cannot describe";
}

TEST(Hdf5Types, AnAttributeNamesATypeOfTheSameSize) {
  const LibraryLock lock;
  const auto bytes = type_of(DType::kUint8);
  ASSERT_TRUE(bytes);
  EXPECT_EQ(read_type(bytes->get(), "float8_e4m3fn")->dtype, DType::kFloat8E4M3);
  for (const char* const name : {"float32", "nothing"}) {
    const auto refused = read_type(bytes->get(), name);
    ASSERT_FALSE(refused) << name;
    EXPECT_EQ(refused.error().code(), ErrorCode::kCorrupt);
    EXPECT_EQ(refused.error().message(),
              "attribute reshard_dtype: expected a type of 1 byte, got '" + std::string(name) + "'");
  }
}

TEST(Hdf5Library, FailuresBecomeErrorsThatSayOfWhat) {
  const LibraryLock lock;
  EXPECT_FALSE(Handle().ok());
  const auto refused = checked(-1, ErrorCode::kCorrupt, "dataset 'w'");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kCorrupt);
  EXPECT_THAT(refused.error().message(), HasSubstr("dataset 'w'"));
  EXPECT_TRUE(checked_call(0, ErrorCode::kCorrupt, "nothing"));
  EXPECT_FALSE(checked_call(-1, ErrorCode::kCorrupt, "something"));
}

}  // namespace
}  // namespace reshard::hdf5::types_test
