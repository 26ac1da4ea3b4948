// Tests converting Adam's state between frameworks: masters, moments, and the number of steps.
#include "lib/convert/adam.h"

#include <gmock/gmock.h>

#include "tests/support/conversion_steps.h"
#include "tests/support/made_checkpoint.h"
#include "tests/support/temp_dir.h"

namespace reshard::adam_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const std::string kNorm = "model.norm.weight", kState = "optimizer.state." + kNorm;

class Adam : public testing::Test {
 protected:
  void add_moments(const Dims& shape) {
    for (const char* moment : {".exp_avg", ".exp_avg_sq"}) source_.add(kState + moment, shape, counted(volume(shape)));
  }
  SourceView view() {
    source_.write();
    return {source_.catalog(), {}};
  }
  std::string error_of_masters() {
    SourceView v = view();
    ConversionNotes notes;
    return error_of(add_masters(v, notes));
  }
  TempDir dir_;
  MadeCheckpoint source_{dir_.path(), "data"};
};

TEST_F(Adam, MastersAreTheWeightsWhereThereAreNone) {
  source_.add(kNorm, DType::kBFloat16, {2}, {"\x80\x3f\x00\x40", 4});  // 1, 2
  source_.add("lm_head.weight", {2}, {3, 4});                          // has no moments
  add_moments({2});
  SourceView v = view();
  ConversionNotes notes;
  ASSERT_TRUE(add_masters(v, notes));
  EXPECT_THAT(names_of(v.catalog), ElementsAre(kNorm, "lm_head.weight", kState + ".exp_avg", kState + ".exp_avg_sq",
                                               kState + ".fp32_param"));
  const Tensor& master = v.catalog.tensors().back();
  EXPECT_EQ(master.dtype, DType::kBFloat16);
  EXPECT_EQ(master.model_dtype, DType::kFloat32) << "which it is written as";
  EXPECT_TRUE(is_same_data(master, v.catalog.tensors()[0]));
  EXPECT_TRUE(v.catalog.shares_extents);
  EXPECT_EQ(floats_of(v.catalog, source_.files(), master.name), (std::vector<float>{1, 2}));
  EXPECT_THAT(notes.warnings, ElementsAre(HasSubstr("no float32 masters of 1 tensor ('" + kNorm + "')")));
}

TEST_F(Adam, MastersThatAreThereStay) {
  source_.add(kNorm, {2}, {1, 2});
  source_.add(kState + ".fp32_param", {2}, {3, 4});
  add_moments({2});
  SourceView v = view();
  ConversionNotes notes;
  ASSERT_TRUE(add_masters(v, notes));
  EXPECT_EQ(v.catalog.tensors().size(), 4U);
  EXPECT_FALSE(v.catalog.shares_extents);
  EXPECT_THAT(notes.warnings, IsEmpty());
}

TEST_F(Adam, TheStepsOfAGroupNeedNoMoments) {
  source_.add(kNorm, {2}, {1, 2});
  add_moments({2});
  source_.add("optimizer.param_groups.0.step", DType::kInt32, {}, std::string("\7\0\0\0", 4));
  SourceView v = view();
  ConversionNotes notes;
  ASSERT_TRUE(add_masters(v, notes));
  EXPECT_TRUE(v.catalog.find(kState + ".fp32_param"));
}

TEST_F(Adam, AStateNeedsBothMoments) {
  source_.add(kNorm, {2}, {1, 2});
  source_.add(kState + ".exp_avg", {2}, {1, 2});
  EXPECT_THAT(error_of_masters(), HasSubstr("the optimizer has no exp_avg_sq of tensor '" + kNorm + "'"));
}

TEST_F(Adam, AStateOfAnotherOptimizerHasNoPlace) {
  source_.add(kNorm, {2}, {1, 2});
  source_.add(kState + ".momentum_buffer", {2}, {1, 2});
  EXPECT_THAT(error_of_masters(), AllOf(HasSubstr("1 tensor of the optimizer ('" + kState + ".momentum_buffer')"),
                                        HasSubstr("are not Adam's state")));
}

TEST_F(Adam, MomentsAreOfAWeightOfTheirShape) {
  source_.add(kNorm, {2}, {1, 2});
  add_moments({3});
  EXPECT_THAT(error_of_masters(), HasSubstr("[3]: no weight of this shape belongs to this moment"));
}

TEST_F(Adam, WeightsThatAreNoFloatsAreNoMasters) {
  source_.add(kNorm, DType::kFloat8E4M3, {2}, "88");
  add_moments({2});
  EXPECT_THAT(error_of_masters(), HasSubstr("is float8_e4m3fn and has no float32 master"));
}

// ---- one number of steps for all

TEST_F(Adam, StepsThatAgreeBecomeOneNumber) {
  source_.add(kNorm, {2}, {1, 2});
  source_.add(kState + ".step", {}, {7});
  source_.add("optimizer.state.lm_head.weight.step", {1}, {7});
  SourceView v = view();
  EXPECT_EQ(must(take_steps(v, source_.files(), false)), 7);
  EXPECT_EQ(v.values, (std::unordered_set<std::size_t>{1, 2}));
  SourceView unread = view();
  EXPECT_EQ(must(take_steps(unread, source_.files(), true)), 0) << "which nobody looked at";
  EXPECT_EQ(unread.values.size(), 2U);
}

TEST_F(Adam, StepsMayBeIntegers) {
  source_.add("optimizer.param_groups.0.step", DType::kInt32, {}, std::string("\7\0\0\0", 4));
  source_.add(kState + ".step", DType::kInt64, {}, std::string("\7\0\0\0\0\0\0\0", 8));
  SourceView v = view();
  EXPECT_EQ(must(take_steps(v, source_.files(), false)), 7);
  MadeCheckpoint flag(dir_.path(), "flag");
  flag.add(kState + ".step", DType::kBool, {}, std::string("\1", 1));
  flag.write();
  SourceView refused{flag.catalog(), {}};
  EXPECT_THAT(error_of(take_steps(refused, flag.files(), false)), HasSubstr("bool []: expected a single number"));
}

TEST_F(Adam, WithoutStepsThereIsNoNumber) {
  source_.add(kNorm, {2}, {1, 2});
  add_moments({2});
  SourceView v = view();
  EXPECT_EQ(must(take_steps(v, source_.files(), false)), std::nullopt);
  EXPECT_TRUE(v.values.empty());
}

TEST_F(Adam, StepsThatDifferAreRefused) {
  source_.add("optimizer.state.a.step", {}, {7});
  source_.add("optimizer.state.b.step", {}, {8});
  SourceView v = view();
  EXPECT_THAT(error_of(take_steps(v, source_.files(), false)),
              HasSubstr("different numbers of steps: tensor 'optimizer.state.b.step' is 8 and tensor "
                        "'optimizer.state.a.step' is 7"));
}

TEST_F(Adam, StepsAreWholeNumbers) {
  for (const float value : {0.5F, -1.0F, 16'777'216.0F, std::numeric_limits<float>::quiet_NaN()}) {
    MadeCheckpoint source(dir_.path(), "steps");
    source.add(kState + ".step", {}, {value});
    source.write();
    SourceView v{source.catalog(), {}};
    const auto steps = take_steps(v, source.files(), false);
    ASSERT_FALSE(steps) << value;
    EXPECT_EQ(steps.error().code(), ErrorCode::kCorrupt);
    EXPECT_THAT(steps.error().message(), HasSubstr("expected a number of steps, got"));
  }
  source_.add(kState + ".step", {2}, {1, 1});
  SourceView v = view();
  EXPECT_THAT(error_of(take_steps(v, source_.files(), false)), HasSubstr("[2]: expected a single number of steps"));
}

// ---- a number with each parameter

TEST_F(Adam, TheStepsOfAGroupBecomeThoseOfEachParameter) {
  source_.add(kNorm, {2}, {1, 2});
  source_.add("lm_head.weight", {2}, {1, 2});
  add_moments({2});
  source_.add_object("optimizer.param_groups." + kNorm + ".step", "12");
  SourceView v = view();
  ASSERT_TRUE(add_steps(v, source_, source_.files()));
  ASSERT_EQ(v.catalog.tensors().size(), 5U) << "none of the weight without moments";
  const Tensor& step = v.catalog.tensors().back();
  EXPECT_EQ(step.name, kState + ".step");
  EXPECT_EQ(step.shape, Dims{});
  EXPECT_EQ(dotted_name(step.path), step.name);
  EXPECT_EQ(step.path.size(), 4U) << "the parameter's name is one key";
  EXPECT_EQ(floats_of(v.catalog, source_.files(), step.name), (std::vector<float>{12}));
}

TEST_F(Adam, NoStepsAreMadeUp) {
  const auto tensors_with = [&](const std::vector<std::pair<std::string, std::string>>& objects) {
    MadeCheckpoint source(dir_.path(), "steps");
    source.add(kNorm, {2}, {1, 2});
    source.add(kState + ".exp_avg", {2}, {1, 2});
    for (const auto& [name, value] : objects) source.add_object(name, value);
    source.write();
    SourceView v{source.catalog(), {}};
    EXPECT_TRUE(add_steps(v, source, source.files()));
    return v.catalog.tensors().size();
  };
  const std::string groups = "optimizer.param_groups.";
  EXPECT_EQ(tensors_with({}), 2U);
  EXPECT_EQ(tensors_with({{kState + ".step", "12"}}), 2U) << "it is there, as an object";
  EXPECT_EQ(tensors_with({{groups + "a.step", "12"}, {groups + "b.step", "13"}}), 2U) << "groups that differ";
  EXPECT_EQ(tensors_with({{groups + "a.step", "many"}}), 2U);
  EXPECT_EQ(tensors_with({{groups + "a.step", "12.0"}, {groups + "b.step", "12"}}), 3U);
}

}  // namespace
}  // namespace reshard::adam_test
