#include "lib/layout/dtype.h"

#include <gtest/gtest.h>

#include <set>

namespace reshard::dtype_test {
namespace {

constexpr int kTypes = static_cast<int>(DType::kComplex128) + 1;

TEST(DType, EveryRowOfTheTableIsFoundByItsNames) {
  std::set<std::string_view> seen;
  for (int i = 0; i < kTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    const DTypeInfo& row = info(dtype);
    EXPECT_EQ(row.dtype, dtype) << "the table is in the enum's order";
    EXPECT_EQ(dtype_from_torch(row.torch_name), dtype);
    if (!row.safetensors_name.empty()) {
      EXPECT_EQ(dtype_from_safetensors(row.safetensors_name), dtype);
    }
    if (!row.storage_class.empty()) {
      EXPECT_EQ(dtype_from_storage_class(row.storage_class), dtype);
    }
    EXPECT_TRUE(seen.insert(row.short_name).second) << row.short_name;
  }
}

TEST(DType, SizesAreThoseOfTorch) {
  EXPECT_EQ(byte_size(DType::kBool), 1);
  EXPECT_EQ(byte_size(DType::kFloat8E4M3), 1);
  EXPECT_EQ(byte_size(DType::kBFloat16), 2);
  EXPECT_EQ(byte_size(DType::kFloat32), 4);
  EXPECT_EQ(byte_size(DType::kInt64), 8);
  EXPECT_EQ(byte_size(DType::kComplex64), 8);
  EXPECT_EQ(byte_size(DType::kComplex128), 16);
}

TEST(DType, KnowsTheWordsOfTorchAndSafetensors) {
  EXPECT_EQ(dtype_from_torch("bfloat16"), DType::kBFloat16);
  EXPECT_EQ(dtype_from_torch("float8_e4m3fn"), DType::kFloat8E4M3);
  EXPECT_EQ(dtype_from_safetensors("F8_E5M2"), DType::kFloat8E5M2);
  EXPECT_EQ(dtype_from_storage_class("HalfStorage"), DType::kFloat16);
  EXPECT_EQ(dtype_from_storage_class("LongStorage"), DType::kInt64);
}

TEST(DType, AnEmptyOrStrangeNameIsNone) {
  EXPECT_EQ(dtype_from_safetensors(""), std::nullopt);
  EXPECT_EQ(dtype_from_storage_class(""), std::nullopt);
  EXPECT_EQ(dtype_from_torch("float31"), std::nullopt);
  EXPECT_EQ(dtype_from_torch("torch.float32"), std::nullopt);
}

TEST(DType, FourTypesConvertIntoEachOther) {
  int n = 0;
  for (int i = 0; i < kTypes; ++i) n += is_floating(static_cast<DType>(i));
  EXPECT_EQ(n, 4);
  EXPECT_TRUE(is_floating(DType::kBFloat16));
  EXPECT_FALSE(is_floating(DType::kFloat8E4M3));
}

}  // namespace
}  // namespace reshard::dtype_test
