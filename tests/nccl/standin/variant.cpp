// What the libraries of the tests differ in, given with -D.
namespace standin {
extern const int version;
extern const char* const fault;
const int version = STANDIN_VERSION;
const char* const fault = STANDIN_FAULT;
}  // namespace standin
