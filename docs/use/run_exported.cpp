// Runs what mode=export format=aoti wrote, without Python:
//
//   run_exported model.aoti input.pt output.pt operators
//
// The last is the folder of that name, which was written beside the package. The input is a tensor
// that torch.save wrote. torch.load reads the output, the first one where the model has several.

#include <ATen/core/ivalue.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

static void run(const char* package, const char* input, const char* output) {
  torch::inductor::AOTIModelPackageLoader model(package);
  std::ifstream in(input, std::ios::binary);
  if (!in) throw std::runtime_error(std::string(input) + " cannot be read");
  const std::vector<char> given{std::istreambuf_iterator<char>(in), {}};
  const std::vector<at::Tensor> found = model.run({torch::jit::pickle_load(given).toTensor().contiguous()});
  const std::vector<char> saved = torch::jit::pickle_save(found.at(0));
  std::ofstream out(output, std::ios::binary);
  out.write(saved.data(), static_cast<std::streamsize>(saved.size()));
  if (!out.flush()) throw std::runtime_error(std::string(output) + " cannot be written");
}

int main(int count, char** args) try {
  if (count != 5) throw std::runtime_error("expected: model.aoti input.pt output.pt operators");
  setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 1);  // else it reads whatever it is given
  // Before the package, which looks its operators up.
  for (const auto& file : std::filesystem::directory_iterator(args[4]))
    if (!dlopen(std::filesystem::absolute(file).c_str(), RTLD_NOW))
      throw std::runtime_error(dlerror());
  const c10::InferenceMode no_gradients;
  run(args[1], args[2], args[3]);
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
