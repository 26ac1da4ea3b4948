// Tests the installation by `cmake --install`: the program runs, an engine finds the package, builds and runs with it,
// and nothing refers to the build tree.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "lib/base/text.h"
#include "tests/support/checkpoints.h"
#include "tests/support/run_command.h"
#include "tests/support/temp_dir.h"

namespace reshard::package_test {
namespace {

// Returns the dynamic section of a program: "(NEEDED)  Shared library: [libz.so.1]", "(RUNPATH)  Library runpath:
// [...]".
std::string dynamic_section(const std::string& program) {
  const CommandResult read = run_command({"/usr/bin/env", "readelf", "-d", program});
  EXPECT_EQ(read.exit_code, 0) << read.err;
  EXPECT_THAT(read.out, testing::HasSubstr("(NEEDED)"));
  return read.out;
}

// An empty or relative entry means the current directory, so a library placed there would be executed. Libraries for
// ranks and GPUs are opened on demand.
void expect_sound_to_start(const std::string& program) {
  const std::string dynamic = dynamic_section(program);
  for (const char* tag : {"runpath: [", "rpath: ["})
    if (const auto at = dynamic.find(tag); at != std::string::npos) {
      const std::size_t begin = at + std::string(tag).size();
      for (const std::string& entry : split(dynamic.substr(begin, dynamic.find(']', begin) - begin), ':'))
        EXPECT_TRUE(entry.starts_with('/') || entry.starts_with("$ORIGIN")) << program << ": '" << entry << "'";
    }
  for (const char* library : {"libmpi", "libnccl", "libcuda", "libcufile"})
    EXPECT_THAT(dynamic, testing::Not(testing::HasSubstr(std::string("[") + library))) << program;
}

TEST(PackageTest, TheProgramLoadsNothingFromTheCurrentDirectoryAndNoMpi) { expect_sound_to_start(RESHARD_BINARY); }

#ifdef RESHARD_CMAKE  // builds with sanitizers are not installed

namespace fs = std::filesystem;

constexpr std::uintmax_t kMaxProgramBytes = 18 << 20;  // HDF5 is 4 MiB of it, and tables of architectures may be 1

CommandResult cmake(std::vector<std::string> args) {
  args.insert(args.begin(), RESHARD_CMAKE);
  return run_command(args, 120);
}

// Configures on a machine with a compiler and nothing else.
TEST(PackageTest, ConfiguringNamesAllMissingPackagesAtOnce) {
  const TempDir dir;
  const CommandResult configured =
      run_command({"/usr/bin/env", "PKG_CONFIG_LIBDIR=" + dir.path(), RESHARD_CMAKE, "-S", RESHARD_SOURCE_DIR, "-B",
                   dir / "build", "-G", RESHARD_GENERATOR, "-DCMAKE_CXX_COMPILER=" RESHARD_CXX,
                   "-DCMAKE_DISABLE_FIND_PACKAGE_CLI11=ON", "-DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON"},
                  120);
  EXPECT_NE(configured.exit_code, 0);
  const std::string setup = read_file(RESHARD_SOURCE_DIR "/samples/setup.sh");
  for (const char* package :
       {"libcli11-dev", "nlohmann-json3-dev", "libzstd-dev", "libisal-dev", "zlib1g-dev", "libhdf5-dev"}) {
    EXPECT_THAT(configured.err, testing::HasSubstr(package));
    EXPECT_THAT(setup, testing::HasSubstr(package));
  }
  EXPECT_THAT(configured.err, testing::HasSubstr("samples/setup.sh"));
}

// Installs into a root of its own, like `dpkg -i`.
TEST(PackageTest, TheDebianPackageHasAllThatIsInstalledAndItsProgramConverts) {
  if (!fs::exists("/usr/bin/dpkg-deb")) GTEST_SKIP() << "this is not Debian";
  const TempDir dir;
  const CommandResult packed =
      run_command({RESHARD_CPACK, "--config", RESHARD_BUILD_DIR "/CPackConfig.cmake", "-B", dir.path()}, 120);
  ASSERT_EQ(packed.exit_code, 0) << packed.out << packed.err;
  std::string package;
  for (const auto& entry : fs::directory_iterator(dir.path()))
    if (entry.path().extension() == ".deb") package = entry.path();
  ASSERT_FALSE(package.empty()) << packed.out;
  const CommandResult depends = run_command({"/usr/bin/dpkg-deb", "-f", package, "Depends"});
  EXPECT_THAT(depends.out, testing::AllOf(testing::HasSubstr("libc6"), testing::HasSubstr("libzstd1")));
  EXPECT_THAT(depends.out, testing::Not(testing::HasSubstr("openmpi")));

  const std::string root = dir / "root";
  ASSERT_EQ(run_command({"/usr/bin/dpkg-deb", "-x", package, root}).exit_code, 0);
  const auto files = all_files(root);
  for (const char* file :
       {"usr/bin/reshard", "usr/share/man/man1/reshard-convert.1.gz", "usr/share/doc/reshard/copyright",
        "usr/share/doc/reshard/changelog.Debian.gz", "usr/include/reshard/formats/load.h",
        "usr/share/bash-completion/completions/reshard", "usr/share/zsh/vendor-completions/_reshard",
        "usr/share/fish/vendor_completions.d/reshard.fish"})
    EXPECT_TRUE(files.contains(file)) << file;
  EXPECT_LE(files.at("usr/bin/reshard").size(), kMaxProgramBytes);
  EXPECT_THAT(files.at("usr/share/doc/reshard/licenses"),
              testing::AllOf(testing::HasSubstr("==== libhdf5-dev ====\n"), testing::HasSubstr("The HDF Group"),
                             testing::HasSubstr("==== nlohmann-json3-dev ====\n")));
  EXPECT_THAT(dynamic_section(root + "/usr/bin/reshard"), testing::Not(testing::HasSubstr("runpath")));
  const CommandResult ran =
      run_command({root + "/usr/bin/reshard", "convert", sample("tp8") + "/checkpoint", dir / "model", "--to", "hf"});
  EXPECT_EQ(ran.exit_code, 0) << ran.err;
  EXPECT_THAT(ran.out, testing::HasSubstr("proof"));
}

TEST(PackageTest, AnEngineBuildsAndRunsWithWhatWasInstalled) {
  const TempDir dir;
  const std::string prefix = dir / "prefix", build = dir / "build", checkpoint = sample("tp8") + "/checkpoint";
  const CommandResult installed = cmake({"--install", RESHARD_BUILD_DIR, "--prefix", prefix, "--strip"});
  ASSERT_EQ(installed.exit_code, 0) << installed.err;

  expect_sound_to_start(prefix + "/bin/reshard");
  EXPECT_LE(fs::file_size(prefix + "/bin/reshard"), kMaxProgramBytes);
  const CommandResult version = run_command({prefix + "/bin/reshard", "--version"});
  EXPECT_EQ(version.exit_code, 0) << version.err;

  const CommandResult configured =
      cmake({"-S", RESHARD_SOURCE_DIR "/tests/package", "-B", build, "-G", RESHARD_GENERATOR,
             "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_COMPILER=" RESHARD_CXX, "-DCMAKE_PREFIX_PATH=" + prefix});
  ASSERT_EQ(configured.exit_code, 0) << configured.err;
  const CommandResult built = cmake({"--build", build});
  ASSERT_EQ(built.exit_code, 0) << built.out << built.err;
  const CommandResult ran = run_command({build + "/engine", checkpoint});
  EXPECT_EQ(ran.exit_code, 0) << ran.err;
  EXPECT_EQ(ran.out, "39 tensors\n");

  int packages = 0;
  for (const auto& [name, text] : all_files(prefix)) {
    const bool is_package = fs::path(name).extension() == ".cmake", is_program = name == "bin/reshard";
    packages += is_package;
    if (!is_package && !is_program) continue;
    // Searches for whole paths, because a short directory name such as "/src" occurs in any program.
    for (const std::string path :
         {RESHARD_SOURCE_DIR "/lib/", RESHARD_SOURCE_DIR "/formats/", RESHARD_SOURCE_DIR "/tools/", RESHARD_BUILD_DIR})
      EXPECT_EQ(text.find(path), std::string::npos) << name << " names " << path;
  }
  EXPECT_EQ(packages, 4);  // the package, its version, its targets and those of this kind of build
}

#endif

}  // namespace
}  // namespace reshard::package_test
